#include "evenkeel/trainer/gpt/gelu.h"

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vector_math.h"
#include "evenkeel/trainer/layers/vectorised.h"

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)): one exponential, and no cancellation where the unit is
// nearly closed.

namespace evenkeel {
namespace {

// 2 sqrt(2 / pi), and that times 0.044715.
constexpr double kLinear = 1.5957691216057308, kCubic = 0.071354816272600248;

// Beyond, the unit is open or closed to below 1e-60, and powers of the input might overflow.
constexpr double kEnd = 12;

template <typename T>
EK_ALWAYS_INLINE T Clamp(T x) {
  return x < T(-kEnd) ? T(-kEnd) : (x > T(kEnd) ? T(kEnd) : x);
}

struct ForwardLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(int64_t n, const T* input, O* output) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T x = Clamp(input[i]);
      const T exponential = Exp(-x * (T(kLinear) + T(kCubic) * x * x));
      const T open = 1 / (1 + exponential);
      output[i] = Narrow<O>(x == T(-kEnd) ? T{0} : input[i] * open);
    }
  }
};

struct BackwardLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(int64_t n, const T* input, const T* diff_output, O* diff_input) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T x = Clamp(input[i]);
      const T exponential = Exp(-x * (T(kLinear) + T(kCubic) * x * x));
      const T open = 1 / (1 + exponential);
      const T closed = exponential * open;  // 1 - open
      const T derivative = open + x * open * closed * (T(kLinear) + T(3 * kCubic) * x * x);
      diff_input[i] = Narrow<O>(diff_output[i] * derivative);
    }
  }
};

}  // namespace

template <typename T, typename O>
void GeluForward(int64_t n, const T* input, O* output) {
  Vectorised<ForwardLoop>(n, input, output);
}

template <typename T, typename O>
void GeluBackward(int64_t n, const T* input, const T* diff_output, O* diff_input) {
  Vectorised<BackwardLoop>(n, input, diff_output, diff_input);
}

template void GeluForward(int64_t, const float*, float*);
template void GeluForward(int64_t, const float*, BFloat16*);
template void GeluForward(int64_t, const double*, double*);
template void GeluBackward(int64_t, const float*, const float*, float*);
template void GeluBackward(int64_t, const float*, const float*, BFloat16*);
template void GeluBackward(int64_t, const double*, const double*, double*);

}  // namespace evenkeel
