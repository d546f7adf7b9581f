#include "evenkeel/zero_optim/gradient_check.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::Status RefuseNonfinite(const std::optional<GradientCheck>& check) {
  if (!check.has_value()) {
    return absl::FailedPreconditionError(
        "the step did not check its gradients: call Step() with skip_nonfinite or with clip");
  }
  if (check->is_finite) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "a gradient is infinite or not a number, on this rank or on another one; the step ",
      check->is_skipped ? "was skipped: the weights are those of the previous step"
                        : "was not skipped, and the weights are no longer finite: call Step() with "
                          "skip_nonfinite"));
}

double ClipCoefficient(double max_norm, double norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient < 1 ? coefficient : 1;
}

double JoinedNorm(absl::Span<const double> norms, double norm) {
  double joined = 0;
  for (const double part : norms)
    joined = norm == kInfinityNorm ? std::max(joined, part) : joined + std::pow(part, norm);
  return norm == kInfinityNorm ? joined : std::pow(joined, 1 / norm);
}

}  // namespace evenkeel
