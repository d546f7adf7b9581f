#include "evenkeel/trainer/layers/elementwise.h"

#include <cstddef>

// This file is compiled so that the compiler vectorises its loops. Otherwise a rectifier is a
// branch for each element, and one that can't be foreseen: that took a tenth of a perceptron's
// step.

namespace evenkeel {

template <typename T>
void ReluBackward(std::span<const T> output, std::span<T> diff) {
  for (size_t i = 0; i < output.size(); ++i) {
    const T before = diff[i];
    diff[i] = output[i] > T{0} ? before : T{0};
  }
}

template <typename T>
void Add(std::span<const T> left, std::span<const T> right, std::span<T> sum) {
  for (size_t i = 0; i < left.size(); ++i) sum[i] = left[i] + right[i];
}

template void ReluBackward(std::span<const float>, std::span<float>);
template void ReluBackward(std::span<const double>, std::span<double>);
template void Add(std::span<const float>, std::span<const float>, std::span<float>);
template void Add(std::span<const double>, std::span<const double>, std::span<double>);

}  // namespace evenkeel
