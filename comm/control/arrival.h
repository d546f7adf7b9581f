// The first exchange of a group's ranks. A rank may be missing for good: it was never started,
// hangs before it connects, or was refused by the store.
//
//   EK_ASSIGN_OR_RETURN(const ControlChannel::Parts all,
//    AwaitArrival(comm.control(), "tcp addresses", mine, {.group = "world", .timeout = timeout}));
//
// Threads: blocks its caller.
// Errors:  those of ControlChannel::Exchange(); DeadlineExceeded names the ranks that have not
// arrived.

#ifndef EVENKEEL_COMM_CONTROL_ARRIVAL_H_
#define EVENKEEL_COMM_CONTROL_ARRIVAL_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel::internal {

struct Arrival {
  std::string group;  // For messages.
  absl::Duration timeout;
  WarnFunction warn = nullptr;
};

// Exchanges `mine` with all ranks, under a topic that the group has not used before. A rank that
// waits longer than kSilentWait logs which ranks are missing. If the group from which this one is
// made (ControlLink::SetOrigin()) fails meanwhile, returns its error.
absl::StatusOr<ControlChannel::Parts> AwaitArrival(ControlChannel& control, absl::string_view topic,
                                                   std::string mine, const Arrival& arrival);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_ARRIVAL_H_
