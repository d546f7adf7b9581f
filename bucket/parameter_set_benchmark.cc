// What it costs to find out, in each step, whether parameters were frozen or unfrozen.
//
//   bazel run //bucket:parameter_set_benchmark

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/trainable_mask.h"
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
  if (params.mask_version() != static_cast<uint64_t>(state.range(0))) state.SkipWithError("the flags changed nothing");
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

BENCHMARK(BM_CompareVersion)->Range(1000, 1000000);
BENCHMARK(BM_CompareMasks)->Range(1000, 1000000);
BENCHMARK(BM_SetTrainableFlags)->Range(1000, 1000000);
BENCHMARK(BM_NaiveTraversal)->Range(1000, 1000000);
BENCHMARK(BM_HashMask)->Range(1000, 1000000);

}  // namespace
}  // namespace evenkeel
