#include "evenkeel/trainer/report/histogram.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace evenkeel {
namespace {

constexpr double kGrowth = 1.1;

double Limit(double exponent) { return std::pow(kGrowth, exponent); }

// The bucket of values in (lower, upper]; its lower end is the upper one of its neighbour, to the
// last bit.
struct Bucket {
  double lower = 0;
  double count = 0;
};
struct Range {
  double lower;
  double upper;
};

Range RangeAround(double magnitude) {
  double exponent = std::ceil(std::log(magnitude) / std::log(kGrowth));
  while (Limit(exponent) < magnitude) ++exponent;  // The logarithm is rounded.
  while (Limit(exponent - 1) >= magnitude) --exponent;
  return {Limit(exponent - 1), Limit(exponent)};
}

// Values of [lower, upper) on the negative side, which is the positive one in a mirror.
Range RangeOf(double value) {
  // Beyond these no limits can be represented.
  constexpr double kLeast = 1e-300, kMost = 1e300;
  if (std::abs(value) < kLeast) return {-kLeast, kLeast};
  const Range range = RangeAround(std::min(std::abs(value), kMost));
  return value > 0 ? range : Range{-range.upper, -range.lower};
}

}  // namespace

Histogram MakeHistogram(std::span<const double> values) {
  Histogram histogram;
  std::map<double, Bucket> buckets;  // By upper limit.
  for (double value : values) {
    if (!std::isfinite(value)) continue;
    histogram.min = histogram.count == 0 ? value : std::min(histogram.min, value);
    histogram.max = histogram.count == 0 ? value : std::max(histogram.max, value);
    ++histogram.count;
    histogram.sum += value;
    histogram.sum_squares += value * value;
    const Range range = RangeOf(value);
    Bucket& bucket = buckets[range.upper];
    bucket.lower = range.lower;
    ++bucket.count;
  }
  for (const auto& [upper, bucket] : buckets) {
    if (!histogram.limits.empty() && bucket.lower > histogram.limits.back()) {
      histogram.limits.push_back(bucket.lower);
      histogram.counts.push_back(0);
    }
    histogram.limits.push_back(upper);
    histogram.counts.push_back(bucket.count);
  }
  return histogram;
}

}  // namespace evenkeel
