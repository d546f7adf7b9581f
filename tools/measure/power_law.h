// How something grows: the exponent of time = factor * size ^ exponent, fitted to measurements.
//
//   ExponentOf(sizes, seconds);  // 1: linear; 2: quadratic
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

// Both positive and of one size, at least 2 with different sizes.
double ExponentOf(std::span<const double> sizes, std::span<const double> seconds);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_
