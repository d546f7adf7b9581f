// The clocks of a simulated host.

#ifndef EVENKEEL_TESTS_SIMULATION_CLOCK_H_
#define EVENKEEL_TESTS_SIMULATION_CLOCK_H_

#include "absl/time/time.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

// Return the host's time in nanoseconds since 1970, at the world's time `now`: the time of day, and
// the time of a clock that is never set.
int64_t TimeOfDay(const Host& host, Nanos now);
int64_t SteadyTime(const Host& host, Nanos now);

// The end of a wait, on one of the two clocks of the calling thread's host.
struct Deadline {
  absl::Time time = absl::InfiniteFuture();
  bool is_steady = false;

  // Returns the world's time at which the clock shows that time, unless it is set until then.
  // Returns kNever if that is a year away or more, and on threads outside the world, which never
  // wait.
  Nanos InWorld() const;
};

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_CLOCK_H_
