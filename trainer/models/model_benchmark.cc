// Forward and backward of the models on one thread, in samples per second. The perceptron in
// float64 runs on plain loops: what oneDNN's kernels are worth.

#include <benchmark/benchmark.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"

namespace evenkeel {
namespace {

void TrainingStep(benchmark::State& state, absl::StatusOr<std::unique_ptr<Model>> model) {
  const TestBatch batch = StripedImages(static_cast<int>(state.range(0)), 1);
  for (auto _ : state) {
    (*model)->parameters().ClearGradients();
    const auto result = (*model)->Forward(batch.images, batch.labels, Mode::kTraining);
    const absl::Status status = (*model)->Backward([](int) { return absl::OkStatus(); });
    if (!result.ok() || !status.ok()) return state.SkipWithError("the step failed");
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void BM_MlpStep(benchmark::State& state) {
  SetComputeThreads(1);
  TrainingStep(state, MakeMlp({.hidden = {64}}));
}
BENCHMARK(BM_MlpStep)->Arg(8)->Arg(64);

void BM_WideMlpStep(benchmark::State& state) {
  SetComputeThreads(1);
  TrainingStep(state, MakeMlp({.hidden = {1024, 1024}}));
}
BENCHMARK(BM_WideMlpStep)->Arg(64);

void BM_MlpFloat64Step(benchmark::State& state) {
  TrainingStep(state, MakeMlp({.hidden = {64}, .dtype = DType::kFloat64}));
}
BENCHMARK(BM_MlpFloat64Step)->Arg(8)->Arg(64);

void BM_CnnStep(benchmark::State& state) {
  SetComputeThreads(1);
  TrainingStep(state, MakeCnn({}));
}
BENCHMARK(BM_CnnStep)->Arg(8)->Arg(64)->Arg(128);

}  // namespace
}  // namespace evenkeel
