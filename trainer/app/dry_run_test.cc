#include "evenkeel/trainer/app/dry_run.h"

#include <gtest/gtest.h>

#include <string>

namespace evenkeel {
namespace {

TEST(DryRunTest, TellsBucketsMemoryAndTime) {
  DryRun run{
      .whole = *MakeStepPlan({.world_size = 2, .samples = 1000, .batch_size = 10, .epochs = 4}),
      .plans = {{.buckets = {{.bytes = 1}}},
                {.step = 1, .buckets = {{.bytes = 2 << 20}, {.bytes = 1536}}}}};
  const auto span = [](SpanKind kind, double from, double to) {
    return TraceSpan{.kind = kind,
                     .begin_ns = static_cast<int64_t>(from * 1e6),
                     .end_ns = static_cast<int64_t>(to * 1e6)};
  };
  run.ranks = {
      {.rank = 0,
       .memory = {.parameters = 1 << 20,
                  .optimizer = 1 << 19,
                  .activations = 3 << 20,
                  .peak_resident = 1 << 30},
       .traces = {{.spans = {span(SpanKind::kForward, 0, 10), span(SpanKind::kBackward, 10, 29)}},
                  {.spans = {span(SpanKind::kForward, 0, 12), span(SpanKind::kWait, 12, 13)}}}},
      {.rank = 1, .memory = {.parameters = 512}}};
  EXPECT_EQ(DescribeDryRun(run),
            "2 buckets: 2 MiB, 1.5 KiB, as gradients become ready\n"
            "rank 0 holds 4.5 MiB: parameters 1 MiB, optimizer state 512 KiB, activations 3 MiB; "
            "its process used at most 1 GiB, including data and libraries\n"
            "rank 1 holds 512 B: parameters 512 B\n"
            "a step takes 21.0 ms: batch 0.0, forward 11.0, backward 9.5, waiting for gradients "
            "0.5, optimizer 0.0\n"
            "200 steps in 4 epochs take about 4.2 s, without evaluation\n");
}

TEST(DryRunTest, OnADeviceAStepIsNotWhatTheHostNeedsForIt) {
  const DryRun run{
      .whole = *MakeStepPlan({.world_size = 2, .samples = 1000, .batch_size = 10, .epochs = 4}),
      .ranks = {
          {.traces = {{.spans = {{.kind = SpanKind::kForward, .begin_ns = 0, .end_ns = 30000000}},
                       .clock = StepClock::kDevice,
                       .host_ns = 2000000}}}}};
  EXPECT_EQ(DescribeDryRun(run),
            "rank 0 holds 0 B:\n"
            "a step takes 30.0 ms on the device: batch 0.0, forward 30.0, backward 0.0, waiting "
            "for gradients 0.0, "
            "optimizer 0.0; the host enqueues it in 2.0\n"
            "200 steps in 4 epochs take about 6.0 s, without evaluation\n");
}

TEST(DryRunTest, TellsWhatADeviceHas) {
  EXPECT_EQ(
      DescribeDevice(Device::Cuda(1),
                     {.name = "Some GPU", .total_bytes = int64_t{80} << 30, .free_bytes = 3 << 20}),
      "cuda:1, Some GPU, has 3 MiB free of 80 GiB");
}

TEST(DryRunTest, WithoutASampledStepThereIsNoTime) {
  const DryRun run{.whole = *MakeStepPlan({.world_size = 1, .samples = 10, .batch_size = 10}),
                   .ranks = {{.rank = 0, .memory = {.parameters = 4}}}};
  EXPECT_EQ(DescribeDryRun(run), "rank 0 holds 4 B: parameters 4 B\n");
}

}  // namespace
}  // namespace evenkeel
