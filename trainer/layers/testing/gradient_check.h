// Compares gradients with central differences.
//
//   const auto numeric =
//       NumericGradient<float>(weight, 1e-3, [&] { return Objective(Forward(input, weight)); });
//   EXPECT_LT(RelativeError<float>(analytic, numeric), 1e-2);

#ifndef EVENKEEL_TRAINER_LAYERS_TESTING_GRADIENT_CHECK_H_
#define EVENKEEL_TRAINER_LAYERS_TESTING_GRADIENT_CHECK_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"

namespace evenkeel {

// Returns the gradient of `objective` by each of `values`, which it must depend on; their values
// are restored.
template <typename T>
std::vector<double> NumericGradient(std::span<T> values, double step,
                                    absl::FunctionRef<double()> objective) {
  std::vector<double> gradient;
  for (T& value : values) {
    const T before = value;
    value = static_cast<T>(before + step);
    const double above = objective();
    const double width_above = value - before;
    value = static_cast<T>(before - step);
    gradient.push_back((above - objective()) / (width_above + (before - value)));
    value = before;
  }
  return gradient;
}

// Returns the largest difference, in units of the largest element of `numeric`.
template <typename T>
double RelativeError(std::span<const T> analytic, std::span<const double> numeric) {
  if (analytic.size() != numeric.size()) return INFINITY;
  double difference = 0;
  double scale = 1e-30;
  for (size_t i = 0; i < numeric.size(); ++i) {
    difference = std::max(difference, std::abs(analytic[i] - numeric[i]));
    scale = std::max(scale, std::abs(numeric[i]));
  }
  return difference / scale;
}

// An arbitrary smooth function of a layer's outputs, and its gradient: the sum of w * output, where
// w are the given weights.
template <typename T>
double WeightedSum(std::span<const T> outputs, std::span<const T> weights) {
  double sum = 0;
  for (size_t i = 0; i < outputs.size(); ++i) sum += static_cast<double>(outputs[i]) * weights[i];
  return sum;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_TESTING_GRADIENT_CHECK_H_
