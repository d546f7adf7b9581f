// Measures the cost of each level of verification: an all-reduce between two threads, small and
// large, from issue to result.

#include <cstdint>
#include <string>
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
#include "evenkeel/comm/verify.h"

namespace evenkeel {
namespace {

constexpr int kRounds = 50;

void BM_AllReduce(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const VerifyLevel level = static_cast<VerifyLevel>(state.range(1));
  state.SetLabel(std::string(ToString(level)));
  for (auto _ : state) {
    absl::Duration elapsed;
    const absl::Status status =
        RunRanks(2,
                 [&](Communicator& comm) -> absl::Status {
                   std::vector<float> data(bytes / sizeof(float), 0.0f);
                   EK_RETURN_IF_ERROR(comm.Barrier());
                   const absl::Time start = absl::Now();
                   for (int i = 0; i < kRounds; ++i)
                     EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
                   if (comm.rank() == 0) elapsed = absl::Now() - start;
                   return absl::OkStatus();
                 },
                 {.verify = level});
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
    state.SetIterationTime(absl::ToDoubleSeconds(elapsed) / kRounds);
  }
}
// As many iterations as say something: each of them makes a group, which takes longer than its
// rounds.
BENCHMARK(BM_AllReduce)
    ->ArgsProduct({{1 << 10, 1 << 20}, {0, 1, 2}})
    ->UseManualTime()
    ->Iterations(40);

}  // namespace
}  // namespace evenkeel
