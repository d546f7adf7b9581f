#include "evenkeel/trainer/report/step_series.h"

#include <cmath>

namespace evenkeel {
namespace {

// Returns the mean of two values, weighted by their steps; if one is unknown, the other one.
double Mean(double a, int64_t a_count, double b, int64_t b_count) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return (a * static_cast<double>(a_count) + b * static_cast<double>(b_count)) /
         static_cast<double>(a_count + b_count);
}

StepPoint Merged(const StepPoint& a, const StepPoint& b) {
  StepPoint merged{.step = a.step, .count = a.count + b.count, .seconds = b.seconds};
  for (double StepPoint::*value :
       {&StepPoint::loss, &StepPoint::accuracy, &StepPoint::learning_rate, &StepPoint::took,
        &StepPoint::exposed, &StepPoint::gradient_norm, &StepPoint::samples}) {
    merged.*value = Mean(a.*value, a.count, b.*value, b.count);
  }
  return merged;
}

}  // namespace

void StepSeries::Add(const StepPoint& point) {
  while (!points_.empty() && points_.back().step >= point.step) points_.pop_back();
  if (!points_.empty() && points_.back().count < stride_) {
    points_.back() = Merged(points_.back(), point);
    return;
  }
  if (points_.size() >= kMaxPoints) Halve();
  points_.push_back(point);
}

void StepSeries::Halve() {
  for (size_t i = 0; i < kMaxPoints / 2; ++i)
    points_[i] = Merged(points_[2 * i], points_[2 * i + 1]);
  points_.resize(kMaxPoints / 2);
  stride_ *= 2;
}

}  // namespace evenkeel
