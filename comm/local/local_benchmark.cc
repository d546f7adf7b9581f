// Measures an all-reduce between threads, from the cost of a wake-up to the memory's bandwidth,
// with the plain loop for scale.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

constexpr int kRounds = 50;

void BM_AllReduce(benchmark::State& state) {
  const int world_size = static_cast<int>(state.range(0));
  const int64_t count = state.range(1);
  for (auto _ : state) {
    absl::Duration elapsed;
    absl::Status status = RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
      std::vector<float> data(count, 0.0f);
      EK_RETURN_IF_ERROR(comm.Barrier());
      const absl::Time start = absl::Now();
      for (int i = 0; i < kRounds; ++i)
        EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
      if (comm.rank() == 0) elapsed = absl::Now() - start;
      return absl::OkStatus();
    });
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
    state.SetIterationTime(absl::ToDoubleSeconds(elapsed) / kRounds);
  }
  state.SetBytesProcessed(state.iterations() * world_size * count *
                          static_cast<int64_t>(sizeof(float)));
}
BENCHMARK(BM_AllReduce)
    ->ArgsProduct({{2, 4}, {1, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 4 << 20}})
    ->UseManualTime();

// One thread, each element from all ranks' buffers to all.
void BM_PlainLoop(benchmark::State& state) {
  const int world_size = static_cast<int>(state.range(0));
  const int64_t count = state.range(1);
  std::vector<std::vector<float>> data(world_size, std::vector<float>(count, 0.0f));
  for (auto _ : state) {
    for (int64_t i = 0; i < count; ++i) {
      float sum = data[0][i];
      for (int rank = 1; rank < world_size; ++rank) sum += data[rank][i];
      for (int rank = 0; rank < world_size; ++rank) data[rank][i] = sum;
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * world_size * count *
                          static_cast<int64_t>(sizeof(float)));
}
BENCHMARK(BM_PlainLoop)->ArgsProduct({{2, 4}, {4 << 10, 512 << 10, 4 << 20}});

}  // namespace
}  // namespace evenkeel
