#include "evenkeel/trainer/report/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_series.h"
#include "evenkeel/trainer/report/testing/example_record.h"
#include "evenkeel/trainer/report/testing/report_page.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Json = nlohmann::json;

// Returns what the page of a record shows.
Json Shown(const RunRecord& record) { return DataOf(RenderReport(record)); }

TEST(HtmlReportTest, IsOnePageThatNeedsNothingElse) {
  const std::string html = RenderPage("the data");
  EXPECT_THAT(html, AllOf(HasSubstr("<!doctype html>\n"), HasSubstr("prefers-color-scheme: dark"),
                          HasSubstr(".dygraph-legend"), HasSubstr("Dygraph"),
                          HasSubstr("Permission is hereby granted"),
                          HasSubstr("'Gradient norm before clipping'"), Not(HasSubstr("{{report")),
                          Not(HasSubstr("{{dygraph"))));
  EXPECT_TRUE(html.ends_with("</html>\n"));
  // Nothing is fetched; the license and dygraphs name addresses in comments.
  for (const char* text : {" src=\"", " href=\"", "url(", "@import", "fetch(", "<link"})
    EXPECT_THAT(html, Not(HasSubstr(text)));
  for (const int ranks : {1, 2, 3, 5, 8, 40}) EXPECT_TRUE(Shown(ExampleRecord(ranks)).is_object());
}

TEST(HtmlReportTest, NoTextOfTheRecordCanEndTheDataOrBeReadAsHtml) {
  const auto brackets = [](const std::string& html) { return std::ranges::count(html, '<'); };
  const auto expected = brackets(RenderPage("the data"));
  for (const std::string text :
       {"</script><script>alert(1)", "<!--<script>", "</SCRIPT >", "{{data}}", "a\0b\x1b[31m"}) {
    RunRecord record = ExampleRecord(2);
    record.title = record.ending = record.ranks[0].host = record.events[0].text = text;
    const std::string html = RenderReport(record);
    EXPECT_EQ(brackets(html), expected) << text;
    const Json data = DataOf(html);
    EXPECT_EQ(data["title"], text);
    EXPECT_EQ(data["memory"]["shown"][0]["host"], text);
    EXPECT_EQ(data["events"]["shown"][0]["text"], text);
  }
  // Bytes that are no UTF-8 become U+FFFD.
  EXPECT_EQ(Shown({.title = "a\xFF"})["title"], "a\xEF\xBF\xBD");
}

TEST(HtmlReportTest, EveryColourIsDefined) {
  std::string html = RenderPage("the data");
  html.resize(html.find("</style>"));
  const std::regex use("var\\((--[a-z0-9]+)\\)");
  for (std::sregex_iterator at(html.begin(), html.end(), use), end; at != end; ++at)
    EXPECT_THAT(html, HasSubstr((*at)[1].str() + ": "));
  for (size_t part = 0; part < std::size(kMemoryParts); ++part)
    EXPECT_THAT(html, HasSubstr(absl::StrCat(".m", part, " { --c: "))) << kMemoryParts[part].name;
  for (int kind = 0; kind < kSpanKinds; ++kind)
    EXPECT_THAT(html, HasSubstr(absl::StrCat(".k", kind, " { --c: ")));
}

TEST(HtmlReportTest, ARunOfWhichNothingIsKnownHasAReport) {
  const Json nothing = Shown({});
  EXPECT_EQ(nothing["result"], nullptr);
  EXPECT_EQ(nothing["batches"], nullptr);
  EXPECT_EQ(nothing["means"]["rate"], nullptr);
  RunRecord stopped = ExampleRecord(2);
  stopped.ending = "why";
  stopped.epochs.clear();
  stopped.ranks.clear();
  stopped.plans.clear();
  const Json data = Shown(stopped);
  EXPECT_EQ(data["ending"], "why");
  EXPECT_EQ(data["sampled"], Json::array());
  EXPECT_EQ(data["plans"], Json({{"more", 0}, {"shown", Json::array()}}));
}

TEST(HtmlReportTest, HasWhatCounts) {
  const Json data = Shown(ExampleRecord(3));
  EXPECT_EQ(data["result"]["test_accuracy"], 0.84);
  EXPECT_NEAR(data["result"]["test_loss"], 0.6, 1e-12);
  EXPECT_EQ(data["is_in_bits_per_byte"], false);
  EXPECT_NEAR(data["means"]["rate"], 19200, 1e-6);
  EXPECT_NEAR(data["means"]["exposed"], 0.05, 1e-12);
  EXPECT_EQ(data["parameters"], 272474);
  EXPECT_EQ(data["samples_of_tail"], 448);
  EXPECT_EQ(data["batches"]["steps"], 200);
  const Json& rank = data["batches"]["shown"][1];
  EXPECT_EQ(rank["exhausted"], 93);
  EXPECT_EQ(rank["shadowed"], 14);
  EXPECT_EQ(rank["until"], nullptr);
  EXPECT_EQ(rank["epochs"][1],
            Json({{"epoch", 1}, {"first_step", 100}, {"batches", 93}, {"shadowed", 7}}));
  EXPECT_EQ(data["plans"]["shown"][1]["shown"][1]["bytes"], 1 << 20);
  EXPECT_EQ(data["plans"]["shown"][1]["bytes"], 4096 + (1 << 20));
  EXPECT_EQ(data["memory"]["shown"][0]["peak"], 300 << 20);
  EXPECT_EQ(data["memory"]["shown"][0]["total"], 5 << 20);
  EXPECT_EQ(data["memory"]["parts"].size(), data["memory"]["shown"][0]["bytes"].size());
}

TEST(HtmlReportTest, CurvesHaveFourDigitsAndGaps) {
  RunRecord record;
  record.steps = {{.step = 0, .loss = 1.23456, .took = 0.01, .exposed = 0.005, .samples = 8},
                  {.step = 1, .count = 4, .accuracy = 0.5}};
  record.tests = {{.step = 4, .loss = 0.5}};
  const Json data = Shown(record);
  EXPECT_EQ(data["steps"]["step"], Json({1, 3.5}));
  EXPECT_EQ(data["steps"]["loss"], Json({1.235, nullptr}));
  EXPECT_EQ(data["steps"]["accuracy"], Json({nullptr, 0.5}));
  EXPECT_EQ(data["steps"]["rate"], Json({800, nullptr}));
  EXPECT_EQ(data["steps"]["ms"], Json({10, nullptr}));
  EXPECT_EQ(data["steps"]["exposed"], Json({0.5, nullptr}));
  EXPECT_EQ(data["tests"], Json({{"step", {5}}, {"loss", {0.5}}, {"accuracy", {nullptr}}}));
}

TEST(HtmlReportTest, HasTheStepsOfEachRank) {
  const Json sampled = Shown(ExampleRecord(2))["sampled"];
  ASSERT_EQ(sampled.size(), 4);
  EXPECT_EQ(sampled[0]["step"], 3) << "Counted from 1.";
  EXPECT_EQ(sampled[0]["length"], 9'500'000);  // The second rank begins half a millisecond later.
  const Json& lane = sampled[0]["shown"][1];
  EXPECT_EQ(lane["rank"], 1);
  EXPECT_EQ(lane["last_gradient"], 7'500'000);
  EXPECT_EQ(lane["enqueued"], nullptr);
  EXPECT_EQ(lane["spans"][0], Json({{"kind", 0}, {"begin", 500'000}, {"end", 1'500'000}}));
  EXPECT_EQ(lane["buckets"][1], Json({{"bytes", 1 << 20},
                                      {"ready", 5'500'000},
                                      {"start", 6'500'000},
                                      {"reduced", 8'500'000}}));
  EXPECT_EQ(sampled[3]["shown"].size(), 1) << "Only rank 1 shadows this step.";
}

TEST(HtmlReportTest, HasTheWaitsByRank) {
  RunRecord record = ExampleRecord(3);
  EXPECT_EQ(Shown(record)["waits"]["shown"].size(), 0);
  record.waits.ranks.resize(3);
  for (int rank = 0; rank < 3; ++rank) {
    StragglerReport::Rank& one = record.waits.ranks[rank];
    one.rank = rank;
    one.mean.busy(StepPhase::kForward) = 4000;
    one.mean.waited_us = rank == 2 ? 500 : 3000;
  }
  record.waits.ranks[2].cost = 0.25;
  record.waits.ranks[2].mean.busy(StepPhase::kSaving) = 2500;
  record.waits.ranks[1].without_input = 0.125;
  record.waits.ranks[0].mean.ready = {.first_us = 750, .last_us = 6500};
  for (int i = 0; i < 5; ++i)
    record.costs.push_back({.step = 49 + 50 * i, .costs = {{0, 0}, {1, 0.01}, {2, 0.05 * i}}});
  const Json data = Shown(record);
  const Json& waits = data["waits"]["shown"];
  EXPECT_EQ(data["waits"]["phases"][static_cast<int>(StepPhase::kSaving)], "saving");
  EXPECT_EQ(waits[2]["us"][static_cast<int>(StepPhase::kSaving)], 2500);
  EXPECT_EQ(waits[2]["us"].back(), 500) << "The wait is the last one.";
  EXPECT_EQ(waits[2]["total"], 7000);
  EXPECT_EQ(waits[2]["cost"], 0.25);
  EXPECT_EQ(waits[1]["without_input"], 0.125);
  EXPECT_EQ(waits[1]["ready"], nullptr);
  EXPECT_EQ(waits[0]["ready"], Json({750, 6500}));
  ASSERT_EQ(data["costs"].size(), 3);
  EXPECT_EQ(data["costs"][0]["rank"], 2) << "The highest one is the first.";
  EXPECT_EQ(data["costs"][0]["cost"], Json({0, 0.05, 0.1, 0.15, 0.2}));
  EXPECT_EQ(data["costs"][0]["until"], nullptr);
  EXPECT_TRUE(data["shares"].empty()) << "They are even.";
  for (CostPoint& point : record.costs)
    point.samples = {{0, 8}, {1, 8 + 0.1 * static_cast<double>(point.step)}};
  const Json shares = Shown(record)["shares"];
  ASSERT_EQ(shares.size(), 2);
  EXPECT_EQ(shares[0]["samples"], Json({8, 8, 8, 8, 8}));
  EXPECT_EQ(shares[1]["rank"], 1);
  EXPECT_EQ(shares[1]["samples"], Json({12.9, 17.9, 22.9, 27.9, 32.9}));
}

TEST(HtmlReportTest, TheSlowRankOfManyIsShown) {
  RunRecord record = ExampleRecord(3);
  for (int i = 0; i < 5; ++i) {
    CostPoint& point = record.costs.emplace_back(CostPoint{.step = 49 + 50 * i});
    for (int rank = 0; rank < 9; ++rank) {
      point.costs[rank] = 0;
      point.samples[rank] = rank == 7 ? 2 : rank == 4 ? 10 : 9;
    }
  }
  const Json shares = Shown(record)["shares"];
  ASSERT_EQ(shares.size(), 6);
  EXPECT_EQ(shares[0]["rank"], 7) << "It has the fewest samples.";
  EXPECT_EQ(shares[0]["samples"], Json({2, 2, 2, 2, 2}));
  EXPECT_EQ(shares[1]["rank"], 4);
}

TEST(HtmlReportTest, ALostRankEndsWhereItWasLost) {
  const Json data = Shown(RecordOfLostRank());
  ASSERT_EQ(data["costs"].size(), 3);
  EXPECT_EQ(data["costs"][0]["rank"], 2);
  EXPECT_EQ(data["costs"][0]["step"], Json({50, 100, 150}));
  EXPECT_EQ(data["costs"][0]["until"], 150);
  EXPECT_EQ(data["costs"][1]["until"], nullptr);
  const Json& ranks = data["batches"]["shown"];
  EXPECT_EQ(ranks[1]["batches"], 186);
  EXPECT_EQ(ranks[1]["until"], nullptr);
  EXPECT_EQ(ranks[2]["shadowed"], 14);
  EXPECT_EQ(ranks[2]["until"], 160);
  EXPECT_EQ(data["events"]["shown"][1]["step"], 161) << "The other ranks continue from this step.";
}

TEST(HtmlReportTest, ResultsOfARunThatDivergedAreTexts) {
  RunRecord record = ExampleRecord(1);
  record.epochs.back().test_loss = std::numeric_limits<double>::infinity();
  record.epochs.back().train_loss = -std::numeric_limits<double>::quiet_NaN();
  const Json result = Shown(record)["result"];
  EXPECT_EQ(result["test_loss"], "inf");
  EXPECT_EQ(result["bits_per_byte"], "inf");
  EXPECT_EQ(result["train_loss"], "nan");
}

// A run that goes on from a checkpoint without a history knows only the steps from there on.
TEST(HtmlReportTest, AStepTakesWhatTheStepsThatAreKnownTake) {
  RunRecord record = ExampleRecord(3);
  EXPECT_NEAR(Shown(record)["means"]["step_seconds"], 0.01, 1e-12);
  record.steps.erase(record.steps.begin(), record.steps.begin() + 150);
  EXPECT_NEAR(Shown(record)["means"]["step_seconds"], 0.01, 1e-12);
}

TEST(HtmlReportTest, OfAnyLengthItIsBelowAMegabyte) {
  RunRecord record = ExampleRecord(64, /*steps=*/10);
  StepSeries series;
  for (int64_t step = 0; step < 1'000'000; ++step) {
    const double noise = static_cast<double>(step * 7919 % 1009) / 1009;
    series.Add({.step = step,
                .seconds = 0.01 * static_cast<double>(step),
                .loss = 0.3 + noise,
                .accuracy = noise,
                .learning_rate = 0.1 * noise,
                .took = 0.01 + noise,
                .exposed = 0.001 * noise,
                .samples = 64});
  }
  record.steps = series.points();
  record.total_steps = 1'000'000;
  for (int i = 0; i < 5000; ++i)
    record.events.push_back({.step = i, .kind = "frozen", .text = "layer"});
  for (int i = 0; i < 1000; ++i) record.plans.push_back(record.plans[1]);
  const EpochPoint epoch = record.epochs.back();
  for (int i = 0; i < 2000; ++i) record.epochs.push_back(epoch);
  const std::string html = RenderReport(record);
  EXPECT_LT(html.size(), 1 << 20);
  const Json data = DataOf(html);
  EXPECT_EQ(data["events"]["more"], record.events.size() - 100);
  EXPECT_EQ(data["plans"]["more"], 998);
  EXPECT_EQ(data["batches"]["more"], 32);
  EXPECT_EQ(data["sampled"][0]["more"], 48);
}

TEST(HtmlReportTest, ALanguageModelIsJudgedInBitsPerByte) {
  RunRecord record = ExampleRecord(2);
  record.bytes_per_prediction = 1;
  record.unit_name = "tokens";
  record.units_per_sample = 64;
  const Json data = Shown(record);
  EXPECT_EQ(data["is_in_bits_per_byte"], true);
  EXPECT_NEAR(data["result"]["bits_per_byte"], 0.866, 1e-3) << "0.6 nats.";
  EXPECT_EQ(data["tests"]["loss"].back(), data["result"]["bits_per_byte"]);
  EXPECT_EQ(data["unit"], "tokens");
  EXPECT_NEAR(data["means"]["rate"], 64 * 12800.0, 1e-6);
}

TEST(HtmlReportTest, RanksOfTwoHostsAreShownFromWhereEachBegins) {
  RunRecord record = ExampleRecord(2);
  record.ranks[0].host = "a";
  record.ranks[1].host = "b";
  const Json same_clock = Shown(record);
  for (StepTrace& trace : record.ranks[1].traces) {
    constexpr int64_t kAhead = int64_t{3600} * 1'000'000'000;
    if (trace.last_gradient_ns > 0) trace.last_gradient_ns += kAhead;
    for (TraceSpan& span : trace.spans)
      span = {span.kind, span.begin_ns + kAhead, span.end_ns + kAhead};
    for (BucketTrace& bucket : trace.buckets) {
      bucket.ready_ns += kAhead;
      bucket.start_ns += kAhead;
      bucket.reduced_ns += kAhead;
    }
  }
  EXPECT_EQ(Shown(record), same_clock);
}

}  // namespace
}  // namespace evenkeel
