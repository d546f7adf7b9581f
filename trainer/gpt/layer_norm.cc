#include "evenkeel/trainer/gpt/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vector_math.h"
#include "evenkeel/trainer/layers/vectorised.h"

namespace evenkeel {
namespace {

struct ForwardLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(int64_t rows, int64_t width, const T* input, const T* weight,
                                   const T* bias, O* output, RowStatistics<T> statistics) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* x = input + row * width;
      O* to = output + row * width;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += x[i];
      const T center = sum / static_cast<T>(width);
      T squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) squares += (x[i] - center) * (x[i] - center);
      const T scale = 1 / std::sqrt(squares / static_cast<T>(width) + T(kLayerNormEpsilon));
#pragma omp simd
      for (int64_t i = 0; i < width; ++i)
        to[i] = Narrow<O>((x[i] - center) * scale * weight[i] + bias[i]);
      statistics.mean[row] = center;
      statistics.inverse_deviation[row] = scale;
    }
  }
};

// With x' the normalised input and g = weight * diff_output: diff_input += scale * (g - mean(g) -
// x' * mean(g x')).
struct InputLoop {
  template <typename T>
  EK_ALWAYS_INLINE static void Run(int64_t width, const T* input, T center, T scale,
                                   const T* weight, const T* diff_output, T* diff_input) {
    T sum = 0, product_sum = 0;
#pragma omp simd reduction(+ : sum, product_sum)
    for (int64_t i = 0; i < width; ++i) {
      const T g = weight[i] * diff_output[i];
      sum += g;
      product_sum += g * (input[i] - center);
    }
    const T mean = sum / static_cast<T>(width);
    const T slope = product_sum * scale * scale / static_cast<T>(width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      diff_input[i] += scale * (weight[i] * diff_output[i] - mean - (input[i] - center) * slope);
    }
  }
};

struct BackwardLoop {
  template <typename T>
  EK_ALWAYS_INLINE static void Run(int64_t rows, int64_t width, const T* input,
                                   RowStatistics<T> statistics, const T* weight,
                                   const T* diff_output, T* diff_weight, T* diff_bias,
                                   T* diff_input) {
    std::fill(diff_weight, diff_weight + width, T{0});
    std::fill(diff_bias, diff_bias + width, T{0});
    for (int64_t row = 0; row < rows; ++row) {
      const T center = statistics.mean[row], scale = statistics.inverse_deviation[row];
      const T* x = input + row * width;
      const T* diff = diff_output + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        diff_weight[i] += diff[i] * ((x[i] - center) * scale);
        diff_bias[i] += diff[i];
      }
      if (diff_input != nullptr)
        InputLoop::Run(width, x, center, scale, weight, diff, diff_input + row * width);
    }
  }
};

}  // namespace

template <typename T, typename O>
void LayerNormForward(int64_t rows, int64_t width, const T* input, const T* weight, const T* bias,
                      O* output, RowStatistics<T> statistics) {
  Vectorised<ForwardLoop>(rows, width, input, weight, bias, output, statistics);
}

template <typename T>
void LayerNormBackward(int64_t rows, int64_t width, const T* input, RowStatistics<T> statistics,
                       const T* weight, const T* diff_output, T* diff_weight, T* diff_bias,
                       T* diff_input) {
  Vectorised<BackwardLoop>(rows, width, input, statistics, weight, diff_output, diff_weight,
                           diff_bias, diff_input);
}

template void LayerNormForward(int64_t, int64_t, const float*, const float*, const float*, float*,
                               RowStatistics<float>);
template void LayerNormForward(int64_t, int64_t, const float*, const float*, const float*,
                               BFloat16*, RowStatistics<float>);
template void LayerNormForward(int64_t, int64_t, const double*, const double*, const double*,
                               double*, RowStatistics<double>);
template void LayerNormBackward(int64_t, int64_t, const float*, RowStatistics<float>, const float*,
                                const float*, float*, float*, float*);
template void LayerNormBackward(int64_t, int64_t, const double*, RowStatistics<double>,
                                const double*, const double*, double*, double*, double*);

}  // namespace evenkeel
