// The fused kernels on each instruction set, beside the same update as a sequence of whole-tensor
// operations.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/zero_optim/internal/update_kernels.h"

namespace evenkeel::internal {
namespace {

constexpr int64_t kInCache = 16 << 10;
constexpr int64_t kInMemory = 8 << 20;

struct Data {
  explicit Data(int64_t n) : value(n, 1.0f), gradient(n, 0.01f), m(n, 0.0f), v(n, 0.0f) {}
  std::vector<float> value, gradient, m, v;
};

AdamCoefficients AdamW() {
  return {.keep = 0.99999,
          .beta1 = 0.9,
          .one_minus_beta1 = 0.1,
          .beta2 = 0.999,
          .one_minus_beta2 = 0.001,
          .epsilon = 1e-8,
          .negative_step_size = -1e-3,
          .sqrt_bias_correction2 = 0.9};
}

void CountBytes(benchmark::State& state, int64_t arrays) {
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(state.iterations() * state.range(0) * arrays *
                          static_cast<int64_t>(sizeof(float)));
}

void BM_AdamW(benchmark::State& state, UpdateKernels<float> kernels) {
  Data data(state.range(0));
  for (auto _ : state) {
    kernels.adam(AdamW(), state.range(0), data.value.data(), data.gradient.data(), data.m.data(),
                 data.v.data());
    benchmark::ClobberMemory();
  }
  CountBytes(state, 7);  // Four read, three written.
}

void BM_SgdWithMomentum(benchmark::State& state, UpdateKernels<float> kernels) {
  Data data(state.range(0));
  const SgdCoefficients sgd = {.momentum = 0.9, .negative_learning_rate = -0.1};
  for (auto _ : state) {
    kernels.sgd_with_momentum(sgd, state.range(0), data.value.data(), data.gradient.data(),
                              data.m.data());
    benchmark::ClobberMemory();
  }
  CountBytes(state, 5);
}

// As a tensor library does it, operation by operation; each loop is vectorised.
void BM_NaiveAdamW(benchmark::State& state) {
  const int64_t n = state.range(0);
  Data data(n);
  std::vector<float> denominator(n);
  float *p = data.value.data(), *g = data.gradient.data(), *m = data.m.data(), *v = data.v.data();
  float* d = denominator.data();
  for (auto _ : state) {
    for (int64_t i = 0; i < n; ++i) p[i] *= 0.99999f;
    for (int64_t i = 0; i < n; ++i) m[i] *= 0.9f;
    for (int64_t i = 0; i < n; ++i) m[i] += 0.1f * g[i];
    for (int64_t i = 0; i < n; ++i) v[i] *= 0.999f;
    for (int64_t i = 0; i < n; ++i) v[i] += 0.001f * g[i] * g[i];
    for (int64_t i = 0; i < n; ++i) d[i] = std::sqrt(v[i]);
    for (int64_t i = 0; i < n; ++i) d[i] /= 0.9f;
    for (int64_t i = 0; i < n; ++i) d[i] += 1e-8f;
    for (int64_t i = 0; i < n; ++i) p[i] += -1e-3f * m[i] / d[i];
    benchmark::ClobberMemory();
  }
  CountBytes(state, 7);
}

BENCHMARK(BM_NaiveAdamW)->Arg(kInCache)->Arg(kInMemory);

void RegisterEach() {
  for (const auto& [name, kernels] : SupportedUpdateKernels<float>()) {
    benchmark::RegisterBenchmark((std::string("BM_AdamW/") + name).c_str(), BM_AdamW, kernels)
        ->Arg(kInCache)
        ->Arg(kInMemory);
    benchmark::RegisterBenchmark((std::string("BM_SgdWithMomentum/") + name).c_str(),
                                 BM_SgdWithMomentum, kernels)
        ->Arg(kInCache)
        ->Arg(kInMemory);
  }
}
const bool kRegistered = (RegisterEach(), true);

}  // namespace
}  // namespace evenkeel::internal
