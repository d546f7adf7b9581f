// Measures the check, in each step, whether parameters were frozen or unfrozen; and the step that
// this guards.
//
//   bazel run //bucket:parameter_set_benchmark

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/bucket/trainability.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

// Made once per size: filling it takes longer than measuring.
ParameterSet& SetOf(int64_t size) {
  static auto& sets = *new std::map<int64_t, ParameterSet>;
  ParameterSet& params = sets[size];
  for (int64_t i = params.size(); i < size; ++i)
    params.Add(absl::StrCat("layer", i / 8, ".weight", i % 8), TensorView());
  return params;
}

// The automatic check: nothing has changed since the version that was seen last.
void BM_CompareVersion(benchmark::State& state) {
  const ParameterSet& params = SetOf(state.range(0));
  const uint64_t seen = params.mask_version();
  for (auto _ : state) benchmark::DoNotOptimize(params.mask_version() == seen);
}

// Without the version: every entry.
void BM_CompareMasks(benchmark::State& state) {
  const ParameterSet& params = SetOf(state.range(0));
  const TrainableMask seen = params.mask();
  for (auto _ : state) benchmark::DoNotOptimize(params.mask() == seen);
}

// A tensor library that keeps the flag in its tensors hands all of them over in each step.
void BM_SetTrainableFlags(benchmark::State& state) {
  ParameterSet& params = SetOf(state.range(0));
  std::vector<uint8_t> flags(state.range(0), 1);
  for (auto _ : state) benchmark::DoNotOptimize(params.SetTrainable(flags).ok());
  if (params.mask_version() != static_cast<uint64_t>(state.range(0)))
    state.SkipWithError("the flags changed nothing");
}

// How others do it: a list of flags, compared one by one with what each parameter says.
struct NaiveParameter {
  std::string name;
  bool requires_grad = true;
};
void BM_NaiveTraversal(benchmark::State& state) {
  const std::vector<NaiveParameter> params(state.range(0));
  const std::vector<bool> seen(state.range(0), true);
  for (auto _ : state) {
    bool is_same = true;
    for (size_t i = 0; i < params.size(); ++i) is_same &= params[i].requires_grad == seen[i];
    benchmark::DoNotOptimize(is_same);
  }
}

void BM_HashMask(benchmark::State& state) {
  const TrainableMask mask(static_cast<int>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(mask.Hash());
}

// The policies, as a step calls them. A reader walks all flags, and allocates nothing.
void BM_CheckWithoutReader(benchmark::State& state) {
  TrainabilityWatch watch({}, &SetOf(state.range(0)), "benchmark");
  int64_t step = 0;
  for (auto _ : state) benchmark::DoNotOptimize(watch.BeforeStep(step++).ok());
}

void BM_CheckWithReader(benchmark::State& state) {
  const std::vector<NaiveParameter> tensors(state.range(0));
  const TrainabilityOptions options{
      .reader = [&](int param) { return tensors[param].requires_grad; }, .wasted_after = 0};
  TrainabilityWatch watch(options, &SetOf(state.range(0)), "benchmark");
  int64_t step = 0;
  for (auto _ : state) benchmark::DoNotOptimize(watch.BeforeStep(step++).ok());
}

void BM_CheckOnNotification(benchmark::State& state) {
  const std::vector<NaiveParameter> tensors(state.range(0));
  const TrainabilityOptions options{
      .policy = TrainabilityPolicy::kOnNotification,
      .reader = [&](int param) { return tensors[param].requires_grad; }};
  TrainabilityWatch watch(options, &SetOf(state.range(0)), "benchmark");
  int64_t step = 1;
  for (auto _ : state) benchmark::DoNotOptimize(watch.BeforeStep(step++).ok());
}

// A step of one rank that computes nothing, with parameters of 16 elements: what a check is added
// to, at its smallest.
void BM_StepThatIsGuarded(benchmark::State& state) {
  constexpr int kElements = 16;
  const int size = static_cast<int>(state.range(0));
  std::vector<float> values(static_cast<size_t>(size) * kElements), grads(values.size());
  ParameterSet params;
  for (int i = 0; i < size; ++i) {
    const size_t begin = static_cast<size_t>(i) * kElements;
    params.Add(absl::StrCat("p", i), absl::MakeSpan(values).subspan(begin, kElements),
               absl::MakeSpan(grads).subspan(begin, kElements));
  }
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}));
    auto step = [&]() -> absl::Status {
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int i = size - 1; i >= 0; --i) {
        params.SetGradState(i, GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(i));
      }
      return ddp->FinishStep();
    };
    for (int i = 0; i < 3; ++i) EK_RETURN_IF_ERROR(step());  // Past the rebuild.
    for (auto _ : state) EK_RETURN_IF_ERROR(step());
    return absl::OkStatus();
  });
  if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
}

#define EK_BENCHMARK_SIZES(name) \
  BENCHMARK(name)->RangeMultiplier(10)->Range(100, 1000000)->Unit(benchmark::kMicrosecond)
EK_BENCHMARK_SIZES(BM_CompareVersion);
EK_BENCHMARK_SIZES(BM_CompareMasks);
EK_BENCHMARK_SIZES(BM_SetTrainableFlags);
EK_BENCHMARK_SIZES(BM_NaiveTraversal);
EK_BENCHMARK_SIZES(BM_HashMask);
EK_BENCHMARK_SIZES(BM_CheckWithoutReader);
EK_BENCHMARK_SIZES(BM_CheckWithReader);
EK_BENCHMARK_SIZES(BM_CheckOnNotification);
EK_BENCHMARK_SIZES(BM_StepThatIsGuarded);

}  // namespace
}  // namespace evenkeel
