// Measures what the attribution of waits adds to a step on one rank: its clock, its part of the
// step's record, and the sums over all ranks.
//
//   bazel run //join/steps:attribution_benchmark

#include <cstdint>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/join/steps/phase_clock.h"
#include "evenkeel/join/steps/straggler_detector.h"

namespace evenkeel {
namespace {

// A step of a model with this many gradients.
void BM_Clock(benchmark::State& state) {
  PhaseClock clock;
  clock.EndReduction();
  for (auto _ : state) {
    const StepPhase before = clock.Enter(StepPhase::kInput);
    clock.Enter(before);
    clock.Enter(StepPhase::kForward);
    for (int64_t gradient = 0; gradient < state.range(0); ++gradient) clock.BeginBackward();
    benchmark::DoNotOptimize(clock.backward_began());
    clock.EndReduction({.first_us = 500, .last_us = 4000});
    const StepPhase outside = clock.Enter(StepPhase::kOptimizer);
    clock.Enter(outside);
    benchmark::DoNotOptimize(clock.Take());
  }
}
BENCHMARK(BM_Clock)->Arg(6)->Arg(150);

// The times of a group of this many ranks: written by one, read and added by each.
void BM_Record(benchmark::State& state) {
  const auto world_size = static_cast<int>(state.range(0));
  StragglerDetector detector(world_size);
  const PhaseTimes times{.busy_us = {20, 300, 3000, 5000, 1500, 0},
                         .waited_us = 700,
                         .ready = {.first_us = 500, .last_us = 4000}};
  std::vector<StragglerDetector::RankTimes> ranks(world_size);
  int64_t bytes = 0;
  for (auto _ : state) {
    const std::string mine = internal::ToBytes(times), ready = internal::ToBytes(times.ready);
    bytes = static_cast<int64_t>(mine.size() + ready.size());
    for (StragglerDetector::RankTimes& rank : ranks) {
      rank.times = *internal::FromBytes<PhaseTimes>(mine, "times");
      rank.times->ready = *internal::FromBytes<BucketsReady>(ready, "times");
    }
    detector.Add(ranks);
  }
  state.counters["bytes"] = static_cast<double>(bytes);
}
BENCHMARK(BM_Record)->Arg(2)->Arg(8)->Arg(64);

}  // namespace
}  // namespace evenkeel
