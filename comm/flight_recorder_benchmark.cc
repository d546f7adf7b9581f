// Measures the cost of recording one collective: begin and end, alone and with another thread that
// records; a copy of the entry for scale.

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/flight_recorder.h"

namespace evenkeel {
namespace {

FlightEntry Entry() {
  return {.channel = 7,
          .what = {.kind = CollectiveKind::kAllReduce,
                   .count = 1 << 20,
                   .role = Role::kBucket,
                   .index = 2},
          .issued = absl::Now(),
          .deadline = absl::InfiniteFuture()};
}

void BM_BeginAndEnd(benchmark::State& state) {
  static FlightRecorder* const recorder = new FlightRecorder(1024);
  for (auto _ : state) recorder->End(recorder->Begin(Entry()), absl::OkStatus());
}
BENCHMARK(BM_BeginAndEnd)->Threads(1)->Threads(2);

void BM_MakeAnEntry(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(Entry());
}
BENCHMARK(BM_MakeAnEntry);

// The watchdog's query at each beat.
void BM_OpenEntries(benchmark::State& state) {
  FlightRecorder recorder(1024);
  for (int i = 0; i < 1024; ++i) recorder.End(recorder.Begin(Entry()), absl::OkStatus());
  for (auto _ : state) benchmark::DoNotOptimize(recorder.OpenEntries());
}
BENCHMARK(BM_OpenEntries);

}  // namespace
}  // namespace evenkeel
