// An optimizer step over threads of one process: sharded, beside the unsharded one that every rank
// repeats.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {
namespace {

constexpr int kStepsPerRound = 10;

// The multilayer perceptron 784-1024-1024-10, or many small tensors.
std::vector<int64_t> Sizes(bool many_small) {
  if (many_small) return std::vector<int64_t>(2000, 256);
  return {784 * 1024, 1024, 1024 * 1024, 1024, 1024 * 10, 10};
}

struct Model {
  explicit Model(const std::vector<int64_t>& sizes) {
    for (int64_t size : sizes) {
      values.push_back(std::make_unique<std::vector<float>>(size, 1.0f));
      gradients.push_back(std::make_unique<std::vector<float>>(size, 0.01f));
      params.Add(std::to_string(values.size()), absl::MakeSpan(*values.back()),
                 absl::MakeSpan(*gradients.back()));
    }
  }
  void SetGradients(GradState state) {
    for (int i = 0; i < params.size(); ++i) params.SetGradState(i, state);
  }
  std::vector<std::unique_ptr<std::vector<float>>> values, gradients;
  ParameterSet params;
};

void RunSteps(benchmark::State& state, const Placement& placement, GradState gradients) {
  const int world_size = static_cast<int>(state.range(0));
  for (auto _ : state) {
    double seconds = 0;
    const absl::Status status = RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
      Model model(Sizes(state.range(1) != 0));
      EK_ASSIGN_OR_RETURN(auto optimizer,
                          Optimizer::Create(comm, model.params, AdamW{}, {.placement = placement}));
      for (int step = -2; step < kStepsPerRound; ++step) {
        model.SetGradients(gradients);
        const absl::Time begin = absl::Now();
        EK_RETURN_IF_ERROR(optimizer->Step());
        if (comm.rank() == 0 && step >= 0) seconds += absl::ToDoubleSeconds(absl::Now() - begin);
      }
      return absl::OkStatus();
    });
    if (!status.ok()) state.SkipWithError(status.ToString().c_str());
    state.SetIterationTime(seconds / kStepsPerRound);
  }
}

void BM_UnshardedStep(benchmark::State& state) {
  RunSteps(state, Replicated{}, GradState::kReduced);
}
void BM_ShardedStep(benchmark::State& state) {
  RunSteps(state, WholeTensors{}, GradState::kReduced);
}
void BM_ShardedStepWithReduction(benchmark::State& state) {
  RunSteps(state, WholeTensors{}, GradState::kLocal);
}

void Settings(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"ranks", "many_small"})->ArgsProduct({{1, 2, 4}, {0, 1}})->UseManualTime();
  benchmark->Unit(benchmark::kMicrosecond);
}
BENCHMARK(BM_UnshardedStep)->Apply(Settings);
BENCHMARK(BM_ShardedStep)->Apply(Settings);
BENCHMARK(BM_ShardedStepWithReduction)->Apply(Settings);

}  // namespace
}  // namespace evenkeel
