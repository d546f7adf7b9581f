#include "evenkeel/tests/simulation/clock.h"

#include <algorithm>
#include <cmath>

namespace evenkeel::simulation {
namespace {

constexpr int64_t kBeginning = 1'800'000'000 * int64_t{kSecond};  // In 2027.
// Later times count as kNever, so that sums with the present time do not overflow.
constexpr absl::Duration kLongest = absl::Hours(24 * 365);

}  // namespace

int64_t TimeOfDay(const Host& host, Nanos now) { return SteadyTime(host, now) + host.clock_set; }

int64_t SteadyTime(const Host& host, Nanos now) {
  return kBeginning + host.clock_offset + now +
         std::llround(static_cast<double>(now) * host.clock_drift * 1e-6);
}

Nanos Deadline::InWorld() const {
  const Thread* const thread = World::Current();
  if (thread == nullptr || time == absl::InfiniteFuture()) return kNever;
  const Nanos now = World::Get()->now();
  const Host& host = *thread->host;
  const absl::Duration left =
      time - absl::FromUnixNanos(is_steady ? SteadyTime(host, now) : TimeOfDay(host, now));
  if (left >= kLongest) return kNever;
  const auto on_clock = std::max<double>(0, absl::ToDoubleNanoseconds(left));
  // Rounded up: at that time the clock must have reached the deadline.
  return now + static_cast<Nanos>(std::ceil(on_clock / (1 + host.clock_drift * 1e-6)));
}

}  // namespace evenkeel::simulation
