#include "evenkeel/comm/device/runtime.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status DeviceRuntime::Synchronize(const Event& event, absl::Time deadline) {
  return event ? DoSynchronize(event, deadline) : absl::OkStatus();
}

absl::Status DeviceRuntime::Synchronize(StreamRef stream, absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(const Event event, Record(stream));
  return DoSynchronize(event, deadline);
}

absl::StatusOr<absl::Duration> DeviceRuntime::Elapsed(const Event& from, const Event& to) {
  for (const Event* const event : {&from, &to}) {
    if (*event && event->is_timed && event->device == from.device) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "Elapsed: ", event == &from ? "the first" : "the second", " moment, on ",
        ToString(event->device), ", is not from RecordTimed() on ", ToString(from.device)));
  }
  for (const Event* const event : {&from, &to}) {
    EK_ASSIGN_OR_RETURN(const bool is_done, IsDone(*event));
    if (!is_done)
      return absl::FailedPreconditionError(
          absl::StrCat("Elapsed: ", ToString(event->device), " has not reached that event yet"));
  }
  return DoElapsed(from, to);
}

}  // namespace evenkeel
