// The passes of a dense layer on one thread. Forward beside the same in steps: the bias copied into
// the output, a BLAS product added to it, the rectifier in a pass of its own; backward beside the
// same by oneDNN's matmul. And the loss, beside softmax, loss and gradient one after the other.
// Names end in batch/inputs/outputs.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "evenkeel/trainer/layers/dense.h"
#include "evenkeel/trainer/layers/elementwise.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/softmax_cross_entropy.h"

namespace evenkeel {
namespace {

struct Layer {
  explicit Layer(const benchmark::State& state)
      : shape{state.range(0), state.range(1), state.range(2)},
        input(shape.batch * shape.inputs, 0.5f),
        weight(shape.outputs * shape.inputs, 0.25f),
        bias(shape.outputs, 0.1f),
        output(shape.batch * shape.outputs, 0.125f) {
    SetComputeThreads(1);
  }
  const DenseShape shape;
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
        DenseForward(layer.products, layer.shape, Activation::kRelu, layer.input.data(),
                     layer.weight.data(), layer.bias.data(), layer.output.data());
    if (!status.ok()) return state.SkipWithError("no product");
  }
  CountOperations(state);
}

void BM_ForwardInSteps(benchmark::State& state) {
  Layer layer(state);
  const auto& [batch, inputs, outputs] = layer.shape;
  for (auto _ : state) {
    for (int64_t row = 0; row < batch; ++row)
      std::ranges::copy(layer.bias, layer.output.begin() + row * outputs);
    const auto code = dnnl_sgemm('N', 'T', batch, outputs, inputs, 1, layer.input.data(), inputs,
                                 layer.weight.data(), inputs, 1, layer.output.data(), outputs);
    if (code != dnnl_success) return state.SkipWithError("no product");
    for (float& score : layer.output) score = std::max(score, 0.0f);
  }
  CountOperations(state);
}

void BM_BackwardWeight(benchmark::State& state) {
  Layer layer(state);
  for (auto _ : state) {
    const absl::Status status =
        DenseBackwardWeight<float>(layer.products, layer.shape, layer.input.data(),
                                   layer.output.data(), {.data = layer.weight.data()});
    if (!status.ok()) return state.SkipWithError("no product");
  }
  CountOperations(state);
}

// A product by oneDNN's matmul instead of its BLAS.
void RunMatmul(benchmark::State& state, const dnnl::memory::desc& left,
               const dnnl::memory::desc& right, const dnnl::memory::desc& output) {
  SetComputeThreads(1);
  OneDnn dnn;
  const dnnl::matmul product(dnnl::matmul::primitive_desc({left, right, output}, dnn.engine));
  const dnnl::memory from = dnn.Allocate(left), by = dnn.Allocate(right), to = dnn.Allocate(output);
  for (auto _ : state) {
    product.execute(dnn.stream, {{DNNL_ARG_SRC, from}, {DNNL_ARG_WEIGHTS, by}, {DNNL_ARG_DST, to}});
  }
  CountOperations(state);
}

dnnl::memory::desc Matrix(int64_t rows, int64_t columns, dnnl::memory::format_tag tag) {
  return {{rows, columns}, dnnl::memory::data_type::f32, tag};
}

void BM_BackwardWeightByMatmul(benchmark::State& state) {
  const int64_t batch = state.range(0), inputs = state.range(1), outputs = state.range(2);
  RunMatmul(state, Matrix(outputs, batch, dnnl::memory::format_tag::ba),
            Matrix(batch, inputs, dnnl::memory::format_tag::ab),
            Matrix(outputs, inputs, dnnl::memory::format_tag::ab));
}

void BM_BackwardInput(benchmark::State& state) {
  Layer layer(state);
  for (auto _ : state) {
    const absl::Status status = DenseBackwardInput(layer.products, layer.shape, layer.weight.data(),
                                                   layer.output.data(), layer.input.data());
    if (!status.ok()) return state.SkipWithError("no product");
  }
  CountOperations(state);
}

void BM_BackwardInputByMatmul(benchmark::State& state) {
  const int64_t batch = state.range(0), inputs = state.range(1), outputs = state.range(2);
  RunMatmul(state, Matrix(batch, outputs, dnnl::memory::format_tag::ab),
            Matrix(outputs, inputs, dnnl::memory::format_tag::ab),
            Matrix(batch, inputs, dnnl::memory::format_tag::ab));
}

// Measures the work outside of the products: the rectifier's and the bias's gradients.
void BM_BackwardReluAndBias(benchmark::State& state) {
  Layer layer(state);
  std::vector<float> diff = layer.output;
  for (auto _ : state) {
    ReluBackward<float>(layer.output, diff);
    DenseBackwardBias<float>(layer.shape, diff.data(), {.data = layer.bias.data()});
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
BENCHMARK(BM_ForwardInSteps)->Apply(Layers);
BENCHMARK(BM_BackwardWeight)->Apply(Layers);
BENCHMARK(BM_BackwardWeightByMatmul)->Apply(Layers);
BENCHMARK(BM_BackwardInput)->Apply(Layers);
BENCHMARK(BM_BackwardInputByMatmul)->Apply(Layers);
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

void BM_SoftmaxCrossEntropy(benchmark::State& state) {
  Scores data(state.range(0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        SoftmaxCrossEntropy<float>(data.scores, data.labels, std::span<float>(data.diff)));
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_SoftmaxCrossEntropy)->Arg(64);

void BM_SoftmaxCrossEntropyInSteps(benchmark::State& state) {
  Scores data(state.range(0));
  const int64_t batch = state.range(0), classes = Scores::kClasses;
  std::vector<double> log_softmax(data.scores.size());
  for (auto _ : state) {
    double sum = 0;
    int correct = 0;
    for (int64_t row = 0; row < batch; ++row) {
      const float* scores = &data.scores[row * classes];
      const double highest = *std::max_element(scores, scores + classes);
      double total = 0;
      for (int64_t i = 0; i < classes; ++i) total += std::exp(scores[i] - highest);
      for (int64_t i = 0; i < classes; ++i)
        log_softmax[row * classes + i] = scores[i] - highest - std::log(total);
    }
    for (int64_t row = 0; row < batch; ++row) sum -= log_softmax[row * classes + data.labels[row]];
    for (int64_t row = 0; row < batch; ++row) {
      const float* scores = &data.scores[row * classes];
      correct += std::max_element(scores, scores + classes) - scores == data.labels[row];
    }
    for (int64_t row = 0; row < batch; ++row) {
      for (int64_t i = 0; i < classes; ++i) {
        const double probability = std::exp(log_softmax[row * classes + i]);
        data.diff[row * classes + i] = static_cast<float>((probability - (i == data.labels[row])) /
                                                          static_cast<double>(batch));
      }
    }
    benchmark::DoNotOptimize(sum);
    benchmark::DoNotOptimize(correct);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_SoftmaxCrossEntropyInSteps)->Arg(64);

}  // namespace
}  // namespace evenkeel
