#include "evenkeel/trainer/report/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <regex>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_series.h"
#include "evenkeel/trainer/report/testing/example_record.h"
#include "evenkeel/trainer/report/testing/page_check.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(PageCheckTest, FindsWhatIsWrong) {
  const std::string begin = "<!doctype html>\n<p>";
  EXPECT_EQ(CheckPage(begin + "a &lt; b</p>\n"), "");
  for (const char* bad :
       {"a < b</p>", "a", "</b></p>", "<i class=x></i></p>", "&nbsp;</p>",
        "<i title=\"&\"></i></p>", "a\"</p>", "<img src=\"x\">", "<i onload=\"x\"></i></p>",
        "\x01</p>", "</p>a", "<script type=\"application/json\">{</script></p>",
        "<i a=\"1\" a=\"2\"></i></p>"}) {
    EXPECT_NE(CheckPage(begin + bad), "") << bad;
  }
}

TEST(HtmlReportTest, IsOnePageThatNeedsNothingElse) {
  for (const int ranks : {1, 2, 3, 5, 8, 40}) {
    const std::string html = RenderReport(ExampleRecord(ranks));
    EXPECT_EQ(CheckPage(html), "") << ranks;
    EXPECT_THAT(html, Not(HasSubstr("<b onload"))) << ranks;
    EXPECT_THAT(html, Not(HasSubstr(">nan"))) << ranks;
  }
}

TEST(HtmlReportTest, EveryPartOfTheMemoryHasAColour) {
  const std::string html = RenderReport(ExampleRecord(2));
  for (size_t part = 0; part < std::size(kMemoryParts); ++part) {
    EXPECT_THAT(html,
                HasSubstr(absl::StrCat("class=\"key m", part, "\">", kMemoryParts[part].name)));
    EXPECT_THAT(html, HasSubstr(absl::StrCat(".m", part, " { --c: "))) << kMemoryParts[part].name;
  }
}

TEST(HtmlReportTest, EveryColourIsDefined) {
  const std::string html = RenderReport({});
  const std::regex use("var\\((--[a-z0-9]+)\\)");
  for (std::sregex_iterator at(html.begin(), html.end(), use), end; at != end; ++at)
    EXPECT_THAT(html, HasSubstr((*at)[1].str() + ": "));
}

TEST(HtmlReportTest, ARunOfWhichNothingIsKnownHasAReport) {
  EXPECT_EQ(CheckPage(RenderReport({})), "");
  RunRecord stopped = ExampleRecord(2);
  stopped.ending = kHostile;
  stopped.epochs.clear();
  stopped.ranks.clear();
  stopped.plans.clear();
  const std::string html = RenderReport(stopped);
  EXPECT_EQ(CheckPage(html), "");
  EXPECT_THAT(html, HasSubstr("The run did not come to its end."));
}

TEST(HtmlReportTest, SaysWhatCounts) {
  const std::string html = RenderReport(ExampleRecord(3));
  for (const char* text :
       {"84.00 %", "0.6000", "19,200", "5.0 %", "272,474 parameters", "first exhausted at step 93",
        "448 more samples", "exposed", "bucket 1", "1.0 MiB", "process at most 300 MiB"}) {
    EXPECT_THAT(html, HasSubstr(text));
  }
}

TEST(HtmlReportTest, ShowsTheWaitsByRank) {
  RunRecord record = ExampleRecord(3);
  EXPECT_THAT(RenderReport(record), Not(HasSubstr("Waits by rank")));
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
  const std::string html = RenderReport(record);
  EXPECT_EQ(CheckPage(html), "");
  for (const char* text : {"Waits by rank", "cost the group 25.0 %",
                           "buckets ready after 0.750 to 6.50 ms of backward", "saving: 2.50 ms",
                           "no input for 12.5 %", "Cost of a rank"}) {
    EXPECT_THAT(html, HasSubstr(text));
  }
  EXPECT_THAT(html, HasSubstr(">rank 2</span>"));
}

TEST(HtmlReportTest, ALostRankEndsWhereItWasLost) {
  RunRecord record = ExampleRecord(3);
  EXPECT_THAT(RenderReport(record), Not(HasSubstr("until step")));
  for (int i = 0; i < 5; ++i) {
    record.costs.push_back({.step = 49 + 50 * i, .costs = {{0, 0}, {1, 0.01}}});
    if (i < 3) record.costs.back().costs[2] = 0.05;
  }
  // Rank 2 is lost at step 160 of 200, in the second epoch.
  EpochPoint& last = record.epochs.back();
  record.parts = {last};
  record.parts[0].step = 159;
  record.parts[0].batches = {60, 60, 60};
  last.first_step = 160;
  last.ranks = {0, 1};
  last.batches = {40, 33};
  const std::string html = RenderReport(record);
  EXPECT_EQ(CheckPage(html), "");
  EXPECT_THAT(html, HasSubstr(">rank 2, until step 149</span>"));
  EXPECT_THAT(html, HasSubstr("<b>rank 1</b> <span>186 batches"));
  EXPECT_THAT(html, HasSubstr("shadowed 14 steps, until step 159</span>"));
}

// A run that goes on from a checkpoint without a history knows only the steps from there on.
TEST(HtmlReportTest, AStepTakesWhatTheStepsThatAreKnownTake) {
  RunRecord record = ExampleRecord(3);
  const std::string whole = RenderReport(record);
  EXPECT_THAT(whole, HasSubstr("10.0 ms per step"));
  record.steps.erase(record.steps.begin(), record.steps.begin() + 150);
  EXPECT_THAT(RenderReport(record), HasSubstr("10.0 ms per step"));
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
  EXPECT_EQ(CheckPage(html), "");
  EXPECT_LT(html.size(), 1 << 20);
}

TEST(HtmlReportTest, ALanguageModelIsJudgedInBitsPerByte) {
  RunRecord record = ExampleRecord(2);
  record.bytes_per_prediction = 1;
  record.unit_name = "tokens";
  record.units_per_sample = 64;
  const std::string html = RenderReport(record);
  EXPECT_THAT(html, HasSubstr("Test bits per byte"));
  EXPECT_THAT(html, HasSubstr("0.866")) << "0.6 nats.";
  EXPECT_THAT(html, HasSubstr("tokens per second"));
  EXPECT_THAT(html, Not(HasSubstr("Test accuracy")));
}

TEST(HtmlReportTest, RanksOfTwoHostsAreShownFromWhereEachBegins) {
  RunRecord record = ExampleRecord(2);
  record.ranks[0].host = "a";
  record.ranks[1].host = "b";
  const std::string same_clock = RenderReport(record);
  EXPECT_THAT(same_clock, HasSubstr("4.0 MiB on b, process at most 300 MiB"));
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
  EXPECT_TRUE(RenderReport(record) == same_clock);
}

}  // namespace
}  // namespace evenkeel
