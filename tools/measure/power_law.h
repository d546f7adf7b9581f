// How something grows: time = factor * size ^ exponent, fitted to measurements.
//
//   const PowerLaw law = FitPowerLaw(sizes, seconds);
//   law.exponent;                                       // 1: linear; 2: quadratic
//
// A constant cost beside it bends the line, and makes the exponent smaller: leave the small sizes
// out.
//
// Threads: pure.
// Source:  least squares on the logarithms.

#ifndef EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_
#define EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_

#include <span>

namespace evenkeel {

struct PowerLaw {
  double factor = 0;
  double exponent = 0;
};

// Both positive and of one size, at least 2 with different sizes.
PowerLaw FitPowerLaw(std::span<const double> sizes, std::span<const double> seconds);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_
