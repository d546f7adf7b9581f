#include "evenkeel/trainer/report/chrome_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/testing/example_record.h"
#include "evenkeel/trainer/report/testing/trace_check.h"

namespace evenkeel {
namespace {

std::string Checked(const std::string& events) {
  return CheckTrace(absl::StrCat(
      R"({"traceEvents": [{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"a"}},)",
      R"({"ph":"M","name":"thread_name","pid":1,"tid":0,"args":{"name":"b"}})", events, "]}"));
}

std::string Slice(double ts, double dur, int tid = 0) {
  return absl::StrCat(R"(,{"ph":"X","name":"s","pid":1,"tid":)", tid, R"(,"ts":)", ts, R"(,"dur":)",
                      dur, "}");
}

TEST(TraceCheckTest, FindsWhatIsWrong) {
  EXPECT_EQ(Checked(""), "");
  EXPECT_EQ(Checked(Slice(0, 10) + Slice(0, 5) + Slice(5, 5) + Slice(10, 1)), "");
  EXPECT_NE(Checked(Slice(0, 10) + Slice(5, 6)), "") << "overlap";
  EXPECT_NE(Checked(Slice(0, 10, 7)), "") << "a thread without name";
  EXPECT_NE(Checked(Slice(-1, 10)), "");
  EXPECT_NE(Checked(Slice(1, -1)), "");
  EXPECT_NE(Checked(R"(,{"ph":"X","name":"s","pid":1,"tid":0,"ts":"1","dur":1})"), "");
  EXPECT_NE(Checked(R"(,{"ph":"X","pid":1,"tid":0,"ts":1,"dur":1})"), "");
  EXPECT_NE(Checked(R"(,{"ph":"Q","name":"s","pid":1,"tid":0,"ts":1})"), "");
  EXPECT_NE(
      Checked(R"(,{"ph":"s","name":"s","cat":"c","id":1,"pid":1,"tid":0,"ts":1})" + Slice(0, 3)),
      "");
  EXPECT_NE(Checked(R"(,{"ph":"C","name":"s","pid":1,"tid":0,"ts":1,"args":{"value":"x"}})"), "");
  EXPECT_NE(CheckTrace("[]"), "");
  EXPECT_NE(CheckTrace("{\"traceEvents\":[}"), "");
}

TEST(ChromeTraceTest, IsWhatViewersWant) {
  for (const int ranks : {1, 2, 3, 5, 8})
    EXPECT_EQ(CheckTrace(RenderTrace(ExampleRecord(ranks))), "") << ranks;
  EXPECT_EQ(CheckTrace(RenderTrace({})), "");
}

TEST(ChromeTraceTest, HasTheSettingsOfTheRun) {
  RunRecord record;
  record.settings = {{"ranks", "2"}, {"data", "a \"b\""}};
  const auto trace = nlohmann::json::parse(RenderTrace(record));
  EXPECT_EQ(trace["otherData"]["settings"], (nlohmann::json{{"ranks", "2"}, {"data", "a \"b\""}}));
}

TEST(ChromeTraceTest, BucketsThatOverlapFollowEachOther) {
  RunRecord record = ExampleRecord(1);
  for (StepTrace& trace : record.ranks[0].traces) {
    trace.buckets[1].start_ns = trace.buckets[0].start_ns - 5;
    trace.buckets[1].ready_ns = 0;
    trace.buckets.push_back(
        {.start_ns = trace.buckets[0].start_ns, .reduced_ns = trace.buckets[0].reduced_ns});
  }
  EXPECT_EQ(CheckTrace(RenderTrace(record)), "");
}

TEST(ChromeTraceTest, SaysOfEachBucketWhatItCost) {
  const nlohmann::json trace = nlohmann::json::parse(RenderTrace(ExampleRecord(2)));
  int buckets = 0, arrows = 0, counters = 0;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    arrows += event["ph"] == "s" ? 1 : 0;
    counters += event["ph"] == "C" ? 1 : 0;
    if (event["ph"] != "X" || event["name"] != "bucket 1") continue;
    ++buckets;
    EXPECT_EQ(event["args"]["bytes"], 1 << 20);
    EXPECT_EQ(event["args"]["exposed_us"], 1000);
    EXPECT_EQ(event["args"]["waited_us"], 1000);
    EXPECT_EQ(event["dur"], 2000);
  }
  EXPECT_EQ(buckets, 6);
  EXPECT_EQ(arrows, 12);
  EXPECT_GT(counters, 200);
}

TEST(ChromeTraceTest, HostsAreAlignedByTheEndsOfReductions) {
  RunRecord record = ExampleRecord(3);
  for (RankRecord& rank : record.ranks) {
    rank.host = rank.rank == 0 ? "a" : "b";
    // In the example a rank lags behind the one before it by half a millisecond.
    MoveTimes(rank, rank.rank * -500'000);
    if (rank.rank > 0) MoveTimes(rank, 3'600'000'000'000);
  }
  std::swap(record.ranks[0], record.ranks[1]);  // The host of the first one counts.
  // One of three steps ends later on the other host.
  record.ranks[1].traces[0].spans[4].end_ns += 40'000;
  record.ranks[1].traces[0].spans[5].begin_ns += 40'000;
  const std::string text = RenderTrace(record);
  EXPECT_EQ(CheckTrace(text), "");
  std::map<int, std::string> names;
  std::map<int, double> begins;  // By rank, of step 3.
  const nlohmann::json trace = nlohmann::json::parse(text);
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["name"] == "process_name") names[event["pid"]] = event["args"]["name"];
    if (event["name"] == "step 3") begins[event["pid"]] = event["ts"];
  }
  EXPECT_EQ(names[0], "rank 0 on a, clock aligned to 40.000 us");
  EXPECT_EQ(names[1], "rank 1 on b");
  EXPECT_EQ(names[2], "rank 2 on b");
  EXPECT_EQ(begins[1], begins[0]);
  EXPECT_EQ(begins[2], begins[0]);
}

TEST(ChromeTraceTest, AHostWithoutACommonStepIsNotAligned) {
  RunRecord record = ExampleRecord(2);
  record.ranks[1].host = "b";
  for (StepTrace& trace : record.ranks[1].traces) trace.step += 1000;
  EXPECT_NE(RenderTrace(record).find("on b, clock not aligned"), std::string::npos);
}

TEST(ChromeTraceTest, RanksThatMadeTheOthersWaitHaveACounter) {
  RunRecord record = ExampleRecord(3);
  record.waits.ranks.resize(3);
  for (int rank = 0; rank < 3; ++rank) record.waits.ranks[rank].rank = 2 * rank;
  record.steps = {{.step = 0, .count = 64, .seconds = 0.64, .took = 0.01},
                  {.step = 64, .count = 36, .seconds = 1, .took = 0.01}};
  record.costs = {{.step = 49, .costs = {{0, 0}, {2, 0.01}, {4, 0.25}}},
                  {.step = 99, .costs = {{0, 0}, {2, 0.01}, {4, 0}}},
                  {.step = 99, .costs = {{0, 0}, {2, 0.01}}}};  // Rank 4 was lost.
  std::vector<std::pair<double, double>> costs;
  const nlohmann::json trace = nlohmann::json::parse(RenderTrace(record));
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["ph"] != "C" || !event["name"].get<std::string>().starts_with("cost")) continue;
    EXPECT_EQ(event["name"], "cost of rank 4, %");
    costs.emplace_back(event["ts"], event["args"]["value"]);
  }
  EXPECT_EQ(costs, (std::vector<std::pair<double, double>>{{500'000, 25}, {1'000'000, 0}}));
}

}  // namespace
}  // namespace evenkeel
