// Measures gradients, parameter by parameter.
//
//   GradientMeasure measure(params.size(), /*norm=*/2);
//   for (...) measure.Add(param, gradient);                // those that this rank owns
//   // exact: of each number only one summand is not zero
//   ... sum measure.parts() over the ranks ...
//   const GradientCheck check = measure.Result(/*grad_scale=*/1.0);
//
// Gradients are floats in the CPU's memory.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENT_MEASURE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENT_MEASURE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel::internal {

class GradientMeasure {
 public:
  GradientMeasure(int params, double norm) : norm_(norm), parts_(params + 1, 0.0) {}

  // Called once per parameter; or once per piece of it, if the pieces' order and borders are always
  // the same.
  void Add(int param, const TensorView& gradient);

  // Returns, by parameter, the sum of |g|^p, or the largest |g|; after them the number of
  // parameters with an element that is not finite.
  std::span<double> parts() { return parts_; }

  GradientCheck Result(double grad_scale) const;

 private:
  const double norm_;
  std::vector<double> parts_;
};

// Return whether a step with these options measures its gradients, and by which norm.
inline bool NeedsCheck(const StepOptions& options) {
  return !options.skip && (options.clip.has_value() || options.skip_nonfinite);
}
inline double NormOf(const StepOptions& options) {
  return options.clip.has_value() ? options.clip->norm : kInfinityNorm;
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENT_MEASURE_H_
