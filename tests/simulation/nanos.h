// Virtual time.

#ifndef EVENKEEL_TESTS_SIMULATION_NANOS_H_
#define EVENKEEL_TESTS_SIMULATION_NANOS_H_

#include <cstdint>
#include <limits>

namespace evenkeel::simulation {

using Nanos = int64_t;  // A world begins at 0.
inline constexpr Nanos kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;
inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_NANOS_H_
