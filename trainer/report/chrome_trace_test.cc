#include "evenkeel/trainer/report/chrome_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

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

}  // namespace
}  // namespace evenkeel
