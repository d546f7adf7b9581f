// How long it takes to plan many parameters; a rebuild happens between two steps of a training run.
//
//   bazel run //bucket/plan:planner_benchmark

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

constexpr Device kDevices[] = {Device::Cpu(), Device::Cuda(0), Device::Cuda(1), Device::Cuda(2)};

// Parameters of 1 to 1000 elements. `groups` (dtype, device) pairs follow one another in turn.
std::vector<ParamSpec> MakeParams(int64_t size, int groups) {
  std::mt19937 random(7);
  std::vector<ParamSpec> params(size);
  for (int64_t i = 0; i < size; ++i) {
    const int group = static_cast<int>(i % groups);
    params[i] = {.count = 1 + static_cast<int64_t>(random() % 1000),
                 .dtype = group % 2 == 0 ? DType::kFloat32 : DType::kBFloat16,
                 .device = kDevices[group / 2]};
  }
  return params;
}

void Plan(benchmark::State& state, const std::vector<ParamSpec>& params,
          const PlanOptions& options) {
  for (auto _ : state) benchmark::DoNotOptimize(PlanBuckets(params, options));
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(params.size()));
}

void BM_PlanByIndex(benchmark::State& state) {
  Plan(state, MakeParams(state.range(0), static_cast<int>(state.range(1))), {});
}

// As at a rebuild: the last registered gradient is ready first.
void BM_PlanByReadyOrder(benchmark::State& state) {
  PlanOptions options;
  options.order.resize(state.range(0));
  std::iota(options.order.rbegin(), options.order.rend(), 0);
  Plan(state, MakeParams(state.range(0), static_cast<int>(state.range(1))), options);
}

void BM_PlanByRandomOrder(benchmark::State& state) {
  PlanOptions options;
  options.order.resize(state.range(0));
  std::iota(options.order.begin(), options.order.end(), 0);
  std::shuffle(options.order.begin(), options.order.end(), std::mt19937(8));
  Plan(state, MakeParams(state.range(0), static_cast<int>(state.range(1))), options);
}

// The most buckets there can be.
void BM_PlanOnePerBucket(benchmark::State& state) {
  Plan(state, MakeParams(state.range(0), static_cast<int>(state.range(1))), {.caps = {Bytes{0}}});
}

void BM_PlanSparse(benchmark::State& state) {
  std::vector<ParamSpec> params = MakeParams(state.range(0), static_cast<int>(state.range(1)));
  for (ParamSpec& param : params) param.sparse = true;
  Plan(state, params, {});
}

void BM_PlanFirstStep(benchmark::State& state) {
  const std::vector<ParamSpec> params =
      MakeParams(state.range(0), static_cast<int>(state.range(1)));
  std::vector<int> trained(params.size());
  std::iota(trained.begin(), trained.end(), 0);
  for (auto _ : state) benchmark::DoNotOptimize(PlanFirstStep(params, trained));
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(params.size()));
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"params", "groups"})->Unit(benchmark::kMillisecond);
  for (int64_t params : {1'000, 1'000'000}) {
    for (int64_t groups : {1, 2, 8}) benchmark->Args({params, groups});
  }
}
BENCHMARK(BM_PlanByIndex)->Apply(Shapes);
BENCHMARK(BM_PlanByReadyOrder)->Apply(Shapes);
BENCHMARK(BM_PlanByRandomOrder)->Apply(Shapes);
BENCHMARK(BM_PlanOnePerBucket)->Apply(Shapes);
BENCHMARK(BM_PlanSparse)->Apply(Shapes);
BENCHMARK(BM_PlanFirstStep)->Apply(Shapes);

}  // namespace
}  // namespace evenkeel
