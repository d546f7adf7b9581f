#include "evenkeel/tests/simulation/clock.h"

#include <algorithm>
#include <cmath>

namespace evenkeel::simulation {
namespace {

constexpr int64_t kBeginning = 1'800'000'000 * int64_t{kSecond};  // In 2027.
// Later times count as kNever, so that sums with the present time do not overflow.
constexpr absl::Duration kLongest = absl::Hours(24 * 365);

}  // namespace

int64_t TimeOfDay(const Host& host, Nanos now) {
  return kBeginning + host.clock_offset + now +
         std::llround(static_cast<double>(now) * host.clock_drift * 1e-6);
}

Nanos WorldTime(absl::Time time_of_day) {
  const Thread* const thread = World::Current();
  if (thread == nullptr || time_of_day == absl::InfiniteFuture()) return kNever;
  const Nanos now = World::Get()->now();
  const int64_t here = TimeOfDay(*thread->host, now);
  const absl::Duration left = time_of_day - absl::FromUnixNanos(here);
  if (left >= kLongest) return kNever;
  const auto on_clock = std::max<double>(0, absl::ToDoubleNanoseconds(left));
  // Rounded up: at that time the clock must have reached the deadline.
  return now + static_cast<Nanos>(std::ceil(on_clock / (1 + thread->host->clock_drift * 1e-6)));
}

Nanos TimeAfter(absl::Duration timeout) {
  if (World::Current() == nullptr || timeout >= kLongest) return kNever;
  return World::Get()->now() +
         std::max<Nanos>(0, absl::ToInt64Nanoseconds(absl::Ceil(timeout, absl::Nanoseconds(1))));
}

}  // namespace evenkeel::simulation
