// A training step over ranks that are threads: backward's reduction and the optimizer's update,
// with the state whole, split by tensors, and in slices; those updated in Step(), in backward, or
// with the gather under the next forward.
// Beside the time: megabytes of state on rank 0, and megabytes that it sends per step at least.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/flight_recorder.h"
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
      params.Add(std::to_string(values.size()), absl::MakeSpan(*values.back()),
                 {nullptr, size, DType::kFloat32});
    }
  }
  std::vector<std::unique_ptr<std::vector<float>>> values;
  ParameterSet params;
};

double MegabytesSince(Communicator& comm, int64_t first) {
  double bytes = 0;
  for (const FlightEntry& entry : comm.flight().Entries()) {
    if (entry.number < first) continue;
    const double size = static_cast<double>(entry.what.count * SizeOf(entry.what.dtype));
    const double others = comm.world_size() - 1;
    switch (entry.what.kind) {
      case CollectiveKind::kAllReduce:
        bytes += 2 * size * others / comm.world_size();
        break;
      case CollectiveKind::kBroadcast:  // On average over roots, in a tree or ring.
        bytes += size * others / comm.world_size();
        break;
      default:
        bytes += size * others;
    }
  }
  return bytes / (1 << 20);
}

void RunSteps(benchmark::State& state, const Placement& placement) {
  const int world_size = static_cast<int>(state.range(0));
  double state_bytes = 0, megabytes = 0;
  for (auto _ : state) {
    double seconds = 0;
    const absl::Status status = RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
      Model model(Sizes(state.range(1) != 0));
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params, {},
                                               {.reducer = {.gradient_as_bucket_view = true}}));
      EK_ASSIGN_OR_RETURN(auto optimizer,
                          Optimizer::Create(*ddp, AdamW{}, {.placement = placement}));
      absl::Time begin;
      int64_t first = 0;
      for (int step = -2; step < kStepsPerRound; ++step) {
        if (step == 0) begin = absl::Now();
        first = comm.flight().issued();
        model.params.ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        for (int param = model.params.size() - 1; param >= 0; --param) {
          model.params.SetGradState(
              param,
              GradState::kLocal);  // Whatever lies in the bucket: zeros, or what was there.
          EK_RETURN_IF_ERROR(ddp->GradientReady(param));
        }
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        EK_RETURN_IF_ERROR(optimizer->Step());
      }
      EK_RETURN_IF_ERROR(optimizer->WaitForAll());
      if (comm.rank() != 0) return absl::OkStatus();
      seconds = absl::ToDoubleSeconds(absl::Now() - begin);
      state_bytes = static_cast<double>(optimizer->state_bytes());
      megabytes = MegabytesSince(comm, first);
      return absl::OkStatus();
    });
    if (!status.ok()) state.SkipWithError(status.ToString().c_str());
    state.SetIterationTime(seconds / kStepsPerRound);
  }
  state.counters["state_MB"] = state_bytes / (1 << 20);
  state.counters["sent_MB"] = megabytes;
}

void BM_Whole(benchmark::State& state) { RunSteps(state, Replicated{}); }
void BM_Tensors(benchmark::State& state) { RunSteps(state, WholeTensors{}); }
void BM_Slices(benchmark::State& state) { RunSteps(state, Slices{}); }
void BM_SlicesInBackward(benchmark::State& state) {
  RunSteps(state, Slices{.update_in_backward = true});
}
void BM_SlicesUnderForward(benchmark::State& state) {
  RunSteps(state, Slices{.overlap_forward = true});
}

void Settings(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"ranks", "many_small"})->ArgsProduct({{1, 2, 4}, {0, 1}})->UseManualTime();
  benchmark->Unit(benchmark::kMicrosecond);
}
BENCHMARK(BM_Whole)->Apply(Settings);
BENCHMARK(BM_Tensors)->Apply(Settings);
BENCHMARK(BM_Slices)->Apply(Settings);
BENCHMARK(BM_SlicesInBackward)->Apply(Settings);
BENCHMARK(BM_SlicesUnderForward)->Apply(Settings);

}  // namespace
}  // namespace evenkeel
