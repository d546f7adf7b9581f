#include "evenkeel/comm/internal/arrival.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace evenkeel::internal {

absl::StatusOr<ControlChannel::Parts> AwaitArrival(ControlChannel& control, absl::string_view topic, std::string mine,
                                                   const Arrival& arrival) {
  struct Result {
    absl::Notification has_come;
    absl::StatusOr<ControlChannel::Parts> parts = absl::UnknownError("pending");
  };
  const absl::Time start = absl::Now();
  auto result = std::make_shared<Result>();
  control.Exchange(topic, std::move(mine), [result](const absl::StatusOr<ControlChannel::Parts>& parts) {
    result->parts = parts;
    result->has_come.Notify();
  });
  // "rank 0 has waited 5s for ranks 2,3 to join the group world".
  const auto text = [&](absl::string_view waited, absl::Duration time) {
    const std::string missing = control.WhoIsMissing(topic, 0);
    return absl::StrCat("rank ", control.rank(), " ", waited, " ",
                        absl::FormatDuration(absl::Trunc(time, absl::Milliseconds(1))), " for ",
                        missing.empty() ? "the other ranks" : missing, " to join the group ", arrival.group);
  };
  if (result->has_come.WaitForNotificationWithTimeout(std::min(kSilentWait, arrival.timeout))) return result->parts;
  if (arrival.timeout > kSilentWait) {
    const std::string warning = text("has waited", kSilentWait);  // Takes a while: the hub is asked.
    if (result->has_come.HasBeenNotified()) return result->parts;
    Warn(arrival.warn, warning);
    const absl::Duration left = start + arrival.timeout - absl::Now();
    if (result->has_come.WaitForNotificationWithTimeout(left)) return result->parts;
  }
  return absl::DeadlineExceededError(text("waited", arrival.timeout));
}

}  // namespace evenkeel::internal
