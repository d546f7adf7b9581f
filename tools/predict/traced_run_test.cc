#include "evenkeel/tools/predict/traced_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/tools/predict/speed_model.h"
#include "evenkeel/trainer/report/chrome_trace.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::DoubleNear;
using testing::HasSubstr;

constexpr int64_t kMs = 1000000;  // ns

// A step that begins at `at`: 1 ms to begin, 10 of data, forward and backward, 4 of waiting, 2 for
// the optimizer. The first bucket is ready at 6 and reduced at 8, the second waits for the last
// gradient at 11 and is reduced at 14.
StepTrace StepAt(int64_t number, int64_t at) {
  StepTrace trace{.step = number, .last_gradient_ns = at + 11 * kMs};
  int64_t begin = at;
  const auto add = [&](SpanKind kind, int64_t ms) {
    trace.spans.push_back({.kind = kind, .begin_ns = begin, .end_ns = begin + ms * kMs});
    begin += ms * kMs;
  };
  add(SpanKind::kBegin, 1);
  add(SpanKind::kData, 2);
  add(SpanKind::kForward, 3);
  add(SpanKind::kBackward, 5);
  add(SpanKind::kWait, 4);
  add(SpanKind::kOptimizer, 2);
  trace.buckets = {{.bytes = 4000,
                    .ready_ns = at + 6 * kMs,
                    .start_ns = at + 7 * kMs,
                    .reduced_ns = at + 8 * kMs},
                   {.bytes = 8000,
                    .ready_ns = at + 11 * kMs,
                    .start_ns = at + 11 * kMs,
                    .reduced_ns = at + 14 * kMs}};
  return trace;
}

RunRecord Record() {
  RunRecord record{.title = "mlp, 2 ranks", .world_size = 2, .begin_ns = 5 * kMs};
  record.settings = {{"ranks", "2"},
                     {"backend", "shm"},
                     {"optimizer's state", "state on every rank"},
                     {"gradients are sent as", "none"},
                     {"bytes of buffers", "96"}};
  for (int rank : {0, 1}) {
    record.ranks.push_back(
        {.rank = rank, .host = "a", .traces = {StepAt(2, 10 * kMs), StepAt(3, (30 + rank) * kMs)}});
  }
  return record;
}

std::string MessageOf(const std::string& text) {
  return std::string(ParseTrace("x.json", text).status().message());
}

TEST(ParseTraceTest, ReadsWhatTheTrainerWrites) {
  const auto run = ParseTrace("x.json", RenderTrace(Record()));
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->backend, "shm");
  EXPECT_EQ(run->title, "mlp, 2 ranks");
  EXPECT_EQ(run->ranks, 2);
  EXPECT_EQ(run->buffer_bytes, 96);
  EXPECT_FALSE(run->is_sliced);
  ASSERT_EQ(run->steps.size(), 4);
  const TracedStep& step = run->steps[3];  // Rank 1's second.
  EXPECT_EQ(step.number, 3);
  EXPECT_EQ(step.rank, 1);
  EXPECT_NEAR(step.at, 0.026, 1e-9);
  EXPECT_NEAR(step.seconds, 0.017, 1e-9);
  EXPECT_NEAR(step.begin, 0.001, 1e-9);
  EXPECT_NEAR(step.compute, 0.010, 1e-9);
  EXPECT_NEAR(step.wait, 0.004, 1e-9);
  EXPECT_NEAR(step.optimizer, 0.002, 1e-9);
  EXPECT_NEAR(step.last_gradient, 0.011, 1e-9);
  ASSERT_EQ(step.buckets.size(), 2);
  EXPECT_EQ(step.buckets[0].bytes, 4000);
  EXPECT_NEAR(step.buckets[0].ready, 0.006, 1e-9);
  EXPECT_NEAR(step.buckets[0].start, 0.007, 1e-9);
  EXPECT_NEAR(step.buckets[1].reduced, 0.014, 1e-9);
  EXPECT_NEAR(run->MedianStep(), 0.017, 1e-9);
}

TEST(ParseTraceTest, LeavesOutStepsOfAnEarlierPlanAndShadowedOnes) {
  RunRecord record = Record();
  record.ranks[0].traces[0].buckets.pop_back();  // Before the rebuild there was one bucket.
  record.ranks[1].traces[0] = {
      .step = 2, .spans = {{.kind = SpanKind::kFollow, .begin_ns = kMs, .end_ns = 2 * kMs}}};
  const auto run = ParseTrace("x.json", RenderTrace(record));
  ASSERT_TRUE(run.ok()) << run.status();
  ASSERT_EQ(run->steps.size(), 2);
  for (const TracedStep& step : run->steps) EXPECT_EQ(step.number, 3);
}

TEST(ParseTraceTest, RefusesRunsThatTheModelDoesNotCover) {
  const std::string text = RenderTrace(Record());
  const auto with = [&](const char* from, const char* to) {
    return MessageOf(absl::StrReplaceAll(text, {{from, to}}));
  };
  EXPECT_THAT(with("state on every rank", "state sharded by tensors"),
              AllOf(HasSubstr("x.json"), HasSubstr("by tensors"), HasSubstr("--nozero")));
  EXPECT_THAT(with("\"gradients are sent as\":\"none\"", "\"gradients are sent as\":\"int8\""),
              AllOf(HasSubstr("int8"), HasSubstr("--comm_hook")));
  EXPECT_THAT(with("\"clock\":\"host\"", "\"clock\":\"device\""), HasSubstr("device"));
  EXPECT_THAT(with("\"ranks\":\"2\"", "\"ranks\":\"two\""), HasSubstr("number of ranks"));
  EXPECT_THAT(with("\"bucket ", "\"other "), HasSubstr("no step with buckets"));
  EXPECT_THAT(with("\"bucket 1", "\"bucket 1000000000"), HasSubstr("is no bucket"));
  EXPECT_THAT(with("\"bytes\":4000", "\"bytes\":0"), HasSubstr("of 0 bytes is no bucket"));
}

TEST(ParseTraceTest, BrokenTracesDoNoHarm) {
  constexpr uint64_t kSeed = 20261126;
  std::mt19937_64 random(kSeed);
  const std::string good = RenderTrace(Record());
  int predicted = 0;
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << round);
    const auto run = ParseTrace("x.json", Broken({good}, random));
    if (!run.ok()) {
      EXPECT_EQ(run.status().code(), absl::StatusCode::kInvalidArgument) << run.status();
      continue;
    }
    const auto model = SpeedModel::Fit(std::vector<TracedRun>{*run}, {}, {.backend = "shm"});
    if (!model.ok()) continue;
    EXPECT_GE(model->At({.ranks = 8, .ranks_per_host = 8}).high, 0);
    ++predicted;
  }
  EXPECT_GT(predicted, 30) << "too few broken traces are still traces";
}

TEST(ParseTraceTest, RefusesOtherFiles) {
  EXPECT_EQ(MessageOf(""), "x.json is empty");
  EXPECT_EQ(MessageOf("{\"traceEvents\":1"), "x.json ends before its JSON is complete");
  EXPECT_EQ(MessageOf("not json"), "x.json is not JSON at line 1, column 2");
  EXPECT_THAT(MessageOf(std::string(200'000, '[')), HasSubstr("x.json is nested too deeply"));
  for (const char* text : {"[]", "{}"})
    EXPECT_THAT(MessageOf(text), HasSubstr("x.json: it is no trace; write one with train")) << text;
  const std::string cut = absl::StrReplaceAll(RenderTrace(Record()), {{"\"dur\"", "\"length\""}});
  EXPECT_THAT(MessageOf(cut), HasSubstr("x.json: it is no trace of train: "));
}

}  // namespace
}  // namespace evenkeel
