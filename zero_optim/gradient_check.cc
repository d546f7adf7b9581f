#include "evenkeel/zero_optim/gradient_check.h"

#include <algorithm>
#include <cmath>

namespace evenkeel {

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
