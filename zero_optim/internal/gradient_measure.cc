#include "evenkeel/zero_optim/internal/gradient_measure.h"

#include <algorithm>
#include <cmath>

#include "evenkeel/comm/arith/convert.h"

namespace evenkeel::internal {
namespace {

// So many sums run beside each other, which a compiler makes vectors of; their number is part of
// the result.
constexpr int64_t kLanes = 8;

// `add(lane, |g|)` over all elements; whether all are finite.
template <typename T, typename Add>
bool Fold(std::span<const T> gradient, double (&lanes)[kLanes], Add add) {
  // Zero times a number is zero, unless it is infinite or none; so one sum finds them all, without
  // a branch.
  T zeros[kLanes] = {};
  const int64_t count = static_cast<int64_t>(gradient.size());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const T element = gradient[i + lane];
      zeros[lane] += element * T{0};
      lanes[lane] = add(lanes[lane], std::abs(static_cast<double>(element)));
    }
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) {
    zeros[lane] += gradient[i] * T{0};
    lanes[lane] = add(lanes[lane], std::abs(static_cast<double>(gradient[i])));
  }
  return std::ranges::all_of(zeros, [](T zero) { return zero == 0; });
}

struct Part {
  double value = 0;
  bool is_finite = true;
};

template <typename T>
Part MeasureOf(std::span<const T> gradient, double norm) {
  double lanes[kLanes] = {};
  Part part;
  if (norm == kInfinityNorm) {
    part.is_finite = Fold<T>(gradient, lanes, [](double a, double x) { return a < x ? x : a; });
    part.value = *std::ranges::max_element(lanes);
    return part;
  }
  if (norm == 2) {
    part.is_finite = Fold<T>(gradient, lanes, [](double a, double x) { return a + x * x; });
  } else if (norm == 1) {
    part.is_finite = Fold<T>(gradient, lanes, [](double a, double x) { return a + x; });
  } else {
    part.is_finite =
        Fold<T>(gradient, lanes, [norm](double a, double x) { return a + std::pow(x, norm); });
  }
  for (const double lane : lanes) part.value += lane;
  return part;
}

}  // namespace

void GradientMeasure::Add(int param, const TensorView& gradient) {
  if (gradient.count == 0) return;
  if (SizeOf(gradient.dtype) < SizeOf(DType::kFloat32)) {
    std::vector<float> widened(gradient.count);
    const TensorView view(widened.data(), gradient.count, DType::kFloat32);
    ConvertFloats(gradient, view);
    return Add(param, view);
  }
  const Part part =
      gradient.dtype == DType::kFloat64
          ? MeasureOf<double>({gradient.as<double>().data(), gradient.as<double>().size()}, norm_)
          : MeasureOf<float>({gradient.as<float>().data(), gradient.as<float>().size()}, norm_);
  double& sum = parts_[param];
  sum = norm_ == kInfinityNorm ? std::max(sum, part.value) : sum + part.value;
  if (!part.is_finite) parts_.back() += 1;
}

GradientCheck GradientMeasure::Result(double grad_scale) const {
  if (parts_.back() != 0) return {.norm = kInfinityNorm, .is_finite = false};
  double total = 0;
  for (size_t param = 0; param + 1 < parts_.size(); ++param) {
    total = norm_ == kInfinityNorm ? std::max(total, parts_[param]) : total + parts_[param];
  }
  if (norm_ == 2) total = std::sqrt(total);
  if (norm_ != kInfinityNorm && norm_ != 1 && norm_ != 2) total = std::pow(total, 1 / norm_);
  return {.norm = total * std::abs(grad_scale)};
}

}  // namespace evenkeel::internal
