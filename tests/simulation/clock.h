// The clocks of a simulated host.

#ifndef EVENKEEL_TESTS_SIMULATION_CLOCK_H_
#define EVENKEEL_TESTS_SIMULATION_CLOCK_H_

#include "absl/time/time.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

// Returns the host's time of day, in nanoseconds since 1970, at the world's time `now`.
int64_t TimeOfDay(const Host& host, Nanos now);

// Return the world's time at which the clock of the calling thread's host reaches a time of day, or
// at which a timeout ends. Return kNever if that is a year away or more, and on threads outside the
// world, which never wait.
Nanos WorldTime(absl::Time time_of_day);
Nanos TimeAfter(absl::Duration timeout);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_CLOCK_H_
