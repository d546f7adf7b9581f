#include "evenkeel/trainer/layers/token_loss.h"

#include <algorithm>
#include <cmath>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vector_math.h"
#include "evenkeel/trainer/layers/vectorised.h"

// A row is swept three times, while it is in the cache: for its highest score, for the sum of the
// exponentials, for the gradient.

namespace evenkeel {
namespace {

constexpr int64_t kBlock = 1024;  // Elements that are added in T before float64 takes their sum.

struct HighestLoop {
  template <typename T>
  EK_ALWAYS_INLINE static T Run(int64_t n, const T* scores) {
    T highest = scores[0];
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < n; ++i) highest = scores[i] > highest ? scores[i] : highest;
    return highest;
  }
};

// The sum of exp(score - highest), which it puts in the scores' place where it may.
struct SumLoop {
  template <typename T>
  EK_ALWAYS_INLINE static double Run(int64_t n, T highest, bool overwrite, T* scores) {
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = std::min(n, begin + kBlock);
      T sum = 0;
      if (overwrite) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; ++i) {
          const T exponential = Exp(scores[i] - highest);
          scores[i] = exponential;
          sum += exponential;
        }
      } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; ++i) sum += Exp(scores[i] - highest);
      }
      total += sum;
    }
    return total;
  }
};

struct GradientLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(int64_t n, T factor, const T* exponentials, O* diff) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) diff[i] = Narrow<O>(exponentials[i] * factor);
  }
};

struct LossLoop {
  template <typename T, typename O, typename Target>
  EK_ALWAYS_INLINE static TokenLossResult Run(int64_t vocabulary, T* scores,
                                              std::span<const Target> targets,
                                              double gradient_scale, O* diff_scores) {
    TokenLossResult result;
    for (size_t token = 0; token < targets.size(); ++token) {
      T* row = scores + token * vocabulary;
      const int64_t target = targets[token];
      const T highest = HighestLoop::Run(vocabulary, row);
      const T score = row[target];
      result.correct += score == highest && std::find(row, row + target, highest) == row + target;
      const double total =
          SumLoop::Run(vocabulary, highest, /*overwrite=*/diff_scores != nullptr, row);
      result.sum += (static_cast<double>(highest) - score) + std::log(total);
      if (diff_scores == nullptr) continue;
      O* diff = diff_scores + token * vocabulary;
      const double probability = row[target] / total;
      GradientLoop::Run(vocabulary, static_cast<T>(gradient_scale / total), row, diff);
      diff[target] = Narrow<O>(static_cast<T>(gradient_scale * (probability - 1)));
    }
    return result;
  }
};

}  // namespace

template <typename T, typename O, typename Target>
TokenLossResult TokenLoss(int64_t vocabulary, T* scores,
                          std::type_identity_t<std::span<const Target>> targets,
                          double gradient_scale, O* diff_scores) {
  return Vectorised<LossLoop>(vocabulary, scores, targets, gradient_scale, diff_scores);
}

#define EK_TOKEN_LOSS(T, O, Target) \
  template TokenLossResult TokenLoss<T, O, Target>(int64_t, T*, std::span<const Target>, double, O*)
EK_TOKEN_LOSS(float, float, int32_t);
EK_TOKEN_LOSS(float, BFloat16, int32_t);
EK_TOKEN_LOSS(double, double, int32_t);
EK_TOKEN_LOSS(float, float, uint8_t);
EK_TOKEN_LOSS(double, double, uint8_t);
#undef EK_TOKEN_LOSS

}  // namespace evenkeel
