// Fits how a time grows with a size: the exponent of time = factor * size ^ exponent.
//
//   ExponentOf(sizes, seconds);  // 1: linear; 2: quadratic
//
// A constant cost beside it makes the exponent smaller: leave the small sizes out.
//
// Threads: a pure function.
// Source:  least squares on the logarithms.

#ifndef EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_
#define EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_

#include <span>

namespace evenkeel {

// All values are positive; both spans have one length, and at least two sizes differ.
double ExponentOf(std::span<const double> sizes, std::span<const double> seconds);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_POWER_LAW_H_
