// Measures a step's cost beside the model's own work: 24 parameters of 32768 float32 (3 MiB of
// gradients, one bucket per MiB), nothing computed, over the in-process backend. "Bare" is the same
// bytes all-reduced by hand.
//
//   bazel run //bucket:data_parallel_benchmark      # the column "step" is the time of one step

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"

namespace evenkeel {
namespace {

constexpr int kParams = 24;
constexpr int kCount = 32768;
constexpr int kSteps = 100;

struct Model {
  Model() : values(kParams, std::vector<float>(kCount, 1.0f)), grads(values) {
    for (int p = 0; p < kParams; ++p) {
      params.Add(absl::StrCat("p", p), absl::MakeSpan(values[p]), absl::MakeSpan(grads[p]));
    }
  }
  std::vector<std::vector<float>> values, grads;
  ParameterSet params;
};

absl::Status Steps(DataParallel& ddp, ParameterSet& params) {
  for (int step = 0; step < kSteps; ++step) {
    params.ClearGradients();
    EK_RETURN_IF_ERROR(ddp.BeginStep());
    for (int p = kParams - 1; p >= 0; --p) {
      params.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp.GradientReady(p));
    }
    EK_RETURN_IF_ERROR(ddp.FinishStep());
  }
  return absl::OkStatus();
}

// Runs `body` on every rank again and again; one iteration is kSteps steps, timed on rank 0.
template <typename Body>
void Measure(benchmark::State& state, Body body) {
  const int world = static_cast<int>(state.range(0));
  for (auto _ : state) {
    absl::Duration time;
    absl::Status status = RunRanks(world, [&](Communicator& comm) -> absl::Status {
      absl::StatusOr<absl::Duration> mine = body(comm);
      if (comm.rank() == 0 && mine.ok()) time = *mine;
      return mine.status();
    });
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
    state.SetIterationTime(absl::ToDoubleSeconds(time));
  }
  state.counters["step"] = benchmark::Counter(
      kSteps, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void BM_BareAllReduce(benchmark::State& state) {
  Measure(state, [](Communicator& comm) -> absl::StatusOr<absl::Duration> {
    std::vector<std::vector<float>> buckets(3, std::vector<float>(kParams / 3 * kCount, 1.0f));
    const absl::Time start = absl::Now();
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Work> works;
      for (auto& bucket : buckets)
        works.push_back(comm.user().AllReduce(absl::MakeSpan(bucket), ReduceOp::kAverage));
      for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    }
    return absl::Now() - start;
  });
}
BENCHMARK(BM_BareAllReduce)->Arg(1)->Arg(2)->Arg(4)->UseManualTime()->Unit(benchmark::kMillisecond);

enum JoinMode { kNoJoin, kDisabled, kEnabled };

void BM_Step(benchmark::State& state) {
  const JoinMode mode = static_cast<JoinMode>(state.range(1));
  const bool views = state.range(2) != 0;
  Measure(state, [=](Communicator& comm) -> absl::StatusOr<absl::Duration> {
    Model model;
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(
                      &comm, &model.params, {},
                      {.reducer = {.caps = {Bytes{1 << 20}}, .gradient_as_bucket_view = views}}));
    ddp->SetOptimizerState({});
    EK_RETURN_IF_ERROR(Steps(*ddp, model.params));  // Past the rebuild.
    const absl::Time start = absl::Now();
    if (mode == kNoJoin) {
      EK_RETURN_IF_ERROR(Steps(*ddp, model.params));
    } else {
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get()}, {.enable = mode == kEnabled},
                    [&](JoinScope&) -> absl::Status { return Steps(*ddp, model.params); }));
    }
    return absl::Now() - start;
  });
}
BENCHMARK(BM_Step)
    ->ArgNames({"world", "join", "views"})
    ->ArgsProduct({{1, 2, 4}, {kNoJoin, kDisabled, kEnabled}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace evenkeel
