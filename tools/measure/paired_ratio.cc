#include "evenkeel/tools/measure/paired_ratio.h"

#include <algorithm>
#include <random>
#include <vector>

#include "absl/strings/str_format.h"

namespace evenkeel {

double QuantileOf(std::span<const double> values, double part) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const double at = part * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(at), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

double MedianOf(std::span<const double> values) { return QuantileOf(values, 0.5); }

PairedRatio RatioOf(std::span<const double> a, std::span<const double> b) {
  constexpr int kResamples = 2000;
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  std::mt19937 random(1);
  std::uniform_int_distribution<size_t> any(0, ratios.size() - 1);
  std::vector<double> medians, resample(ratios.size());
  for (int i = 0; i < kResamples; ++i) {
    for (double& one : resample) one = ratios[any(random)];
    medians.push_back(MedianOf(resample));
  }
  std::sort(medians.begin(), medians.end());
  return {.median = MedianOf(ratios),
          .low = medians[kResamples / 40],
          .high = medians[kResamples - 1 - kResamples / 40],
          .pairs = static_cast<int>(ratios.size())};
}

std::string PairedRatio::ToString() const {
  return absl::StrFormat("%.3f [%.3f, %.3f], %d pairs", median, low, high, pairs);
}

}  // namespace evenkeel
