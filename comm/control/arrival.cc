#include "evenkeel/comm/control/arrival.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The time between checks for a failure of the group from which this one is made.
constexpr absl::Duration kGlance = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<ControlChannel::Parts> AwaitArrival(ControlChannel& control, absl::string_view topic,
                                                   std::string mine, const Arrival& arrival) {
  struct Result {
    Notification has_come;
    absl::StatusOr<ControlChannel::Parts> parts = absl::UnknownError("pending");
  };
  const absl::Time start = SteadyNow();
  absl::Status origin;
  auto result = std::make_shared<Result>();
  control.Exchange(topic, std::move(mine), [result](absl::StatusOr<ControlChannel::Parts> parts) {
    result->parts = std::move(parts);
    result->has_come.Notify();
  });
  // "rank 0 has waited 5s for ranks 2,3 to join the group world".
  const auto late = [&](absl::string_view waited, absl::Duration time) {
    const ControlChannel::Missing missing = control.WhoIsMissing(topic, 0);
    return MissedDeadline(
        absl::StrCat("rank ", control.rank(), " ", waited, " ",
                     absl::FormatDuration(absl::Trunc(time, absl::Milliseconds(1))), " for ",
                     missing.text.empty() ? "the other ranks" : missing.text, " to join the group ",
                     arrival.group),
        missing.ranks, topic);
  };
  const auto await = [&](absl::Time until) {
    while (true) {
      const absl::Duration left = until - SteadyNow();
      if (result->has_come.WaitUntil(SteadyNow() + std::min(left, kGlance))) return true;
      origin = control.link().OriginStatus();
      if (left <= kGlance || !origin.ok()) return false;
    }
  };
  if (await(start + std::min(kSilentWait, arrival.timeout))) return std::move(result->parts);
  EK_RETURN_IF_ERROR(origin);
  if (arrival.timeout > kSilentWait) {
    const absl::Status warning =
        late("has waited", kSilentWait);  // Takes a moment: it asks the hub.
    if (result->has_come.HasBeenNotified()) return std::move(result->parts);
    Warn(arrival.warn, std::string(warning.message()));
    if (await(start + arrival.timeout)) return std::move(result->parts);
    EK_RETURN_IF_ERROR(origin);
  }
  return late("waited", arrival.timeout);
}

}  // namespace evenkeel::internal
