// How much longer A takes than B, on a machine that is not quiet.
//
//   std::vector<double> a, b;  // seconds of blocks that ran in turns: a[i] and b[i] side by side
//   const PairedRatio ratio = RatioOf(a, b);
//   std::cout << ratio.ToString();                  // "1.012 [1.004, 1.019], 40 pairs"
//
// Each pair is compared with itself, so whatever slows the machine down for longer than a pair
// cancels out; the median ignores the pairs that something else hit. The interval is the
// bootstrap's: 95 % of the medians of resampled pairs.
//
// Threads: pure; the resampling has a fixed seed.
// Source:  Efron, "Bootstrap methods", Annals of Statistics 1979; percentile interval.

#ifndef EVENKEEL_TOOLS_MEASURE_PAIRED_RATIO_H_
#define EVENKEEL_TOOLS_MEASURE_PAIRED_RATIO_H_

#include <span>
#include <string>

namespace evenkeel {

struct PairedRatio {
  double median = 1;
  double low = 1;  // The interval's ends.
  double high = 1;
  int pairs = 0;

  std::string ToString() const;
};

// Returns the statistics of a[i] / b[i]. Both have the same size, at least 1, and no zeros.
PairedRatio RatioOf(std::span<const double> a, std::span<const double> b);

// Returns a quantile of at least one value, 0 the lowest and 1 the highest; it interpolates.
double QuantileOf(std::span<const double> values, double part);
// The middle one, or the mean of the two in the middle.
double MedianOf(std::span<const double> values);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_PAIRED_RATIO_H_
