#include "evenkeel/trainer/gpt/causal_softmax.h"

#include <algorithm>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vector_math.h"
#include "evenkeel/trainer/layers/vectorised.h"

namespace evenkeel {
namespace {

struct ForwardLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(CausalBlock block, T scale, T* scores, O* probabilities) {
    for (int64_t row = 0; row < block.rows; ++row) {
      T* from = scores + row * block.stride;
      O* to = probabilities + row * block.stride;
      const int64_t seen = block.first + row + 1;
      T highest = from[0];
#pragma omp simd reduction(max : highest)
      for (int64_t i = 0; i < seen; ++i) highest = from[i] > highest ? from[i] : highest;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < seen; ++i) {
        const T exponential = Exp((from[i] - highest) * scale);
        from[i] = exponential;
        sum += exponential;
      }
      const T inverse = 1 / sum;
#pragma omp simd
      for (int64_t i = 0; i < seen; ++i) to[i] = Narrow<O>(from[i] * inverse);
      std::fill(to + seen, to + block.columns, O{});
    }
  }
};

struct BackwardLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(CausalBlock block, T scale, const O* probabilities,
                                   const T* diff_probabilities, O* diff_scores) {
    for (int64_t row = 0; row < block.rows; ++row) {
      const O* probability = probabilities + row * block.stride;
      const T* diff = diff_probabilities + row * block.stride;
      O* to = diff_scores + row * block.stride;
      const int64_t seen = block.first + row + 1;
      T dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < seen; ++i) dot += Widen(probability[i]) * diff[i];
#pragma omp simd
      for (int64_t i = 0; i < seen; ++i)
        to[i] = Narrow<O>(scale * Widen(probability[i]) * (diff[i] - dot));
      std::fill(to + seen, to + block.columns, O{});
    }
  }
};

}  // namespace

template <typename T, typename O>
void CausalSoftmaxForward(CausalBlock block, T scale, T* scores, O* probabilities) {
  Vectorised<ForwardLoop>(block, scale, scores, probabilities);
}

template <typename T, typename O>
void CausalSoftmaxBackward(CausalBlock block, T scale, const O* probabilities,
                           const T* diff_probabilities, O* diff_scores) {
  Vectorised<BackwardLoop>(block, scale, probabilities, diff_probabilities, diff_scores);
}

template void CausalSoftmaxForward(CausalBlock, float, float*, float*);
template void CausalSoftmaxForward(CausalBlock, float, float*, BFloat16*);
template void CausalSoftmaxForward(CausalBlock, double, double*, double*);
template void CausalSoftmaxBackward(CausalBlock, float, const float*, const float*, float*);
template void CausalSoftmaxBackward(CausalBlock, float, const BFloat16*, const float*, BFloat16*);
template void CausalSoftmaxBackward(CausalBlock, double, const double*, const double*, double*);

}  // namespace evenkeel
