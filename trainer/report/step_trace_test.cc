#include "evenkeel/trainer/report/step_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/stream_clock.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;

std::vector<int64_t> SampledOf(int64_t total_steps) {
  const StepRecorder recorder(total_steps);
  std::vector<int64_t> sampled;
  for (int64_t step = 0; step < total_steps; ++step) {
    if (recorder.IsSampled(step)) sampled.push_back(step);
  }
  return sampled;
}

TEST(StepRecorderTest, SamplesTheBeginningAndAFewStepsOfTheRest) {
  EXPECT_THAT(SampledOf(0), ElementsAre());
  EXPECT_THAT(SampledOf(1), ElementsAre());
  EXPECT_THAT(SampledOf(3), ElementsAre(2));
  EXPECT_THAT(SampledOf(8), ElementsAre(2, 3, 4, 5, 6));
  EXPECT_THAT(SampledOf(700), ElementsAre(2, 3, 100, 200, 300, 400, 500, 600));
  EXPECT_LE(SampledOf(1000003).size(), 2 + StepRecorder::kLateSteps);
  const StepRecorder all(9, /*late_steps=*/9);
  for (const int64_t step : {2, 3, 4, 8}) EXPECT_TRUE(all.IsSampled(step)) << step;
}

TEST(StepRecorderTest, SampledStepsAreMeasuredOnes) {
  for (const int64_t total : {10, 75, 140, 999, 12345}) {
    const StepRecorder recorder(total);
    for (const int64_t step : SampledOf(total)) {
      EXPECT_TRUE(step < 10 || step % recorder.sampled_every() == 0) << step << " of " << total;
    }
  }
}

TEST(StepRecorderTest, IsOffUnlessItKnowsTheRun) {
  StepRecorder recorder;
  recorder.Begin(2);
  recorder.Mark(SpanKind::kForward);
  recorder.End({}, {});
  recorder.Follow(3, SteadyNow());
  EXPECT_FALSE(recorder.is_on());
  EXPECT_TRUE(recorder.traces().empty());
}

TEST(StepRecorderTest, SpansFollowEachOther) {
  StepRecorder recorder(100);
  recorder.Begin(2);
  for (SpanKind kind : {SpanKind::kData, SpanKind::kForward, SpanKind::kBackward})
    recorder.Mark(kind);
  recorder.End({}, {});
  ASSERT_EQ(recorder.traces().size(), 1);
  const std::vector<TraceSpan>& spans = recorder.traces()[0].spans;
  ASSERT_EQ(spans.size(), 3);
  EXPECT_EQ(spans[1].kind, SpanKind::kForward);
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_LE(spans[i].begin_ns, spans[i].end_ns);
    if (i > 0) {
      EXPECT_EQ(spans[i - 1].end_ns, spans[i].begin_ns);
    }
  }
}

TEST(StepRecorderTest, ABucketBeginsWhenTheOneBeforeItIsReduced) {
  const absl::Time origin = absl::FromUnixNanos(1'000'000);
  const auto at = [&](int us) { return origin + absl::Microseconds(us); };
  StepTimes times{.begin = at(0),
                  .first_gradient = at(10),
                  .last_gradient = at(30),
                  .end = at(60),
                  .gradients = 2};
  times.buckets = {{.ready = at(10), .launched = at(11), .reduced = at(40)},
                   {.ready = at(20), .launched = at(21), .reduced = at(60)},
                   {.ready = at(25)}};  // Was skipped.
  std::vector<float> memory(8);
  std::vector<BucketInfo> buckets(3);
  for (BucketInfo& bucket : buckets) bucket.data = TensorView(memory.data(), 8, DType::kFloat32);
  StepRecorder recorder(100);
  recorder.Begin(3);
  recorder.End(times, buckets);
  const StepTrace& trace = recorder.traces().at(0);
  EXPECT_EQ(trace.last_gradient_ns, 1'030'000);
  ASSERT_EQ(trace.buckets.size(), 2);
  EXPECT_EQ(trace.buckets[1].bytes, 32);
  EXPECT_EQ(trace.buckets[1].ready_ns, 1'020'000);
  EXPECT_EQ(trace.buckets[1].start_ns, 1'040'000);
  EXPECT_EQ(trace.buckets[1].reduced_ns, 1'060'000);
}

TEST(StepRecorderTest, WhatTheDeviceSaysTakesThePlaceOfTheHostsTimes) {
  StepRecorder off, recorder(1000);
  const auto device = [](int64_t begin_ns) {
    return StreamStep{
        .spans = {{.kind = SpanKind::kForward, .begin_ns = begin_ns, .end_ns = begin_ns + 9000}},
        .last_gradient_ns = begin_ns + 7};
  };
  for (const int64_t step : {2, 3}) {
    recorder.Begin(step);
    recorder.Mark(SpanKind::kForward);
    recorder.End({}, {});
    off.NoteDevice(step, device(100));
    if (step == 3) recorder.NoteDevice(2, device(100));  // A step late.
  }
  recorder.NoteDevice(9, device(100));  // Was not sampled.
  EXPECT_TRUE(off.traces().empty());
  ASSERT_EQ(recorder.traces().size(), 2u);
  EXPECT_EQ(recorder.traces()[0].clock, StepClock::kDevice);
  EXPECT_EQ(recorder.traces()[0].spans.at(0).end_ns, 9100);
  EXPECT_EQ(recorder.traces()[0].last_gradient_ns, 107);
  EXPECT_GE(recorder.traces()[0].host_ns, 0);
  EXPECT_EQ(recorder.traces()[1].clock, StepClock::kHost);
}

TEST(StepRecorderTest, StepsThatAreRepeatedReplaceWhatThereWas) {
  StepRecorder recorder(7);
  const auto take = [&](int64_t step, SpanKind kind) {
    recorder.Begin(step);
    recorder.Mark(kind);
    recorder.End({}, {});
  };
  for (int64_t step = 0; step < 6; ++step) take(step, SpanKind::kForward);
  recorder.Begin(6);
  recorder.Mark(SpanKind::kForward);  // And then a rank is lost.
  take(4, SpanKind::kOptimizer);
  recorder.Follow(5, SteadyNow() - absl::Milliseconds(1));
  std::vector<int64_t> steps;
  for (const StepTrace& trace : recorder.traces()) steps.push_back(trace.step);
  EXPECT_THAT(steps, ElementsAre(2, 3, 4, 5));
  EXPECT_EQ(recorder.traces()[2].spans[0].kind, SpanKind::kOptimizer);
  EXPECT_EQ(recorder.traces()[3].spans[0].kind, SpanKind::kFollow);
  EXPECT_GE(recorder.traces()[3].spans[0].end_ns - recorder.traces()[3].spans[0].begin_ns,
            1'000'000);
}

TEST(StepRecorderTest, NotesAPlanWhenItIsAnotherOne) {
  std::vector<float> memory(12);
  ParameterSet parameters;
  parameters.Add("fc.weight", TensorView(memory.data(), 8, DType::kFloat32));
  parameters.Add("fc.bias", TensorView(memory.data() + 8, 4, DType::kFloat32));
  const int both[] = {1, 0};
  std::vector<BucketInfo> buckets(1);
  buckets[0].params = both;
  StepRecorder off, recorder(100);
  for (const int64_t step : {0, 1, 2, 3}) {
    buckets[0].params =
        step == 0 ? std::span<const int>(both).first(1) : std::span<const int>(both);
    off.NotePlan(step, /*generation=*/step, buckets, parameters);
    recorder.NotePlan(step, /*generation=*/step, buckets, parameters);
  }
  EXPECT_TRUE(off.plans().empty());
  ASSERT_EQ(recorder.plans().size(), 2);
  EXPECT_EQ(recorder.plans()[1].step, 1);
  EXPECT_EQ(recorder.plans()[1].buckets[0].bytes, 48);
  EXPECT_THAT(recorder.plans()[1].buckets[0].parameters, ElementsAre("fc.bias", "fc.weight"));
}

}  // namespace
}  // namespace evenkeel
