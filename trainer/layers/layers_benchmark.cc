// The passes of a dense layer and a classifier's loss, on one thread. Names of a layer's cases end
// in batch/inputs/outputs.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/layers/token_loss.h"

namespace evenkeel {
namespace {

struct Layer {
  explicit Layer(const benchmark::State& state)
      : batch(state.range(0)),
        inputs(state.range(1)),
        outputs(state.range(2)),
        input(batch * inputs, 0.5f),
        weight(outputs * inputs, 0.25f),
        bias(outputs, 0.1f),
        output(batch * outputs, 0.125f) {
    SetComputeThreads(1);
  }
  const int64_t batch, inputs, outputs;
  const LinearShape shape = LinearShape::FromOutputs(batch, inputs, outputs);
  std::vector<float> input, weight, bias, output;
  MatrixProducts<float> products;
};

void CountOperations(benchmark::State& state) {
  state.counters["flops"] = benchmark::Counter(
      2.0 * static_cast<double>(state.range(0) * state.range(1) * state.range(2)),
      benchmark::Counter::kIsIterationInvariantRate);
}

void BM_Forward(benchmark::State& state) {
  Layer layer(state);
  for (auto _ : state) {
    const absl::Status status =
        layer.products.Run(layer.shape.BackwardInput(), layer.input.data(), layer.weight.data(),
                           layer.bias.data(), layer.output.data(), Activation::kRelu);
    if (!status.ok()) return state.SkipWithError("no product");
  }
  CountOperations(state);
}

void BM_BackwardWeight(benchmark::State& state) {
  Layer layer(state);
  for (auto _ : state) {
    const absl::Status status =
        layer.products.Run(layer.shape.BackwardWeight(/*add=*/false), layer.output.data(),
                           layer.input.data(), nullptr, layer.weight.data());
    if (!status.ok()) return state.SkipWithError("no product");
  }
  CountOperations(state);
}

void BM_BackwardInput(benchmark::State& state) {
  Layer layer(state);
  for (auto _ : state) {
    const absl::Status status =
        layer.products.Run(layer.shape.Forward(), layer.output.data(), layer.weight.data(), nullptr,
                           layer.input.data());
    if (!status.ok()) return state.SkipWithError("no product");
  }
  CountOperations(state);
}

// Measures the work outside of the products: the rectifier's and the bias's gradients.
void BM_BackwardReluAndBias(benchmark::State& state) {
  Layer layer(state);
  std::vector<float> diff = layer.output;
  for (auto _ : state) {
    ReluBackward<float>(layer.output, diff);
    SumRows<float, float>(layer.batch, layer.outputs, diff.data(), {.data = layer.bias.data()});
    benchmark::ClobberMemory();
  }
}

void Layers(benchmark::internal::Benchmark* benchmark) {
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {64, 784, 1024}, {64, 1024, 1024}, {64, 1024, 10}, {96, 784, 64}, {96, 64, 10}}) {
    benchmark->Args(shape);
  }
}
BENCHMARK(BM_Forward)->Apply(Layers);
BENCHMARK(BM_BackwardWeight)->Apply(Layers);
BENCHMARK(BM_BackwardInput)->Apply(Layers);
BENCHMARK(BM_BackwardReluAndBias)->Apply(Layers);

struct Scores {
  explicit Scores(int64_t batch) : scores(batch * kClasses), diff(batch * kClasses), labels(batch) {
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i % 7) - 3;
    for (size_t i = 0; i < labels.size(); ++i) labels[i] = i % kClasses;
  }
  static constexpr int64_t kClasses = 10;
  std::vector<float> scores, diff;
  std::vector<uint8_t> labels;
};

// The loss with its gradient uses up the scores, so later rounds have others; the time is the same.
void BM_Loss(benchmark::State& state) {
  Scores data(state.range(0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(TokenLoss<float, float, uint8_t>(Scores::kClasses, data.scores.data(),
                                                              data.labels, 1.0 / data.labels.size(),
                                                              data.diff.data()));
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_Loss)->Arg(64);

}  // namespace
}  // namespace evenkeel
