// The clocks of a simulated host.

#ifndef EVENKEEL_TESTS_SIMULATION_CLOCK_H_
#define EVENKEEL_TESTS_SIMULATION_CLOCK_H_

#include "absl/time/time.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

// The time of day, in nanoseconds since 1970, on the host's clock when it is `now` in the world.
int64_t TimeOfDay(const Host& host, Nanos now);

// The world's time at which the calling thread's host has this time of day; kNever if never.
// Outside a world kNever: nobody waits there.
Nanos WorldTime(absl::Time time_of_day);
Nanos TimeAfter(absl::Duration timeout);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_CLOCK_H_
