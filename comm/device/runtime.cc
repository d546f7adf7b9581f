#include "evenkeel/comm/device/runtime.h"

#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status DeviceRuntime::Synchronize(const Event& event, absl::Time deadline) {
  return event ? DoSynchronize(event, deadline) : absl::OkStatus();
}

absl::Status DeviceRuntime::Synchronize(StreamRef stream, absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(const Event event, Record(stream));
  return DoSynchronize(event, deadline);
}

}  // namespace evenkeel
