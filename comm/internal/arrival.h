// How the ranks of a group find each other: the first exchange, in which a rank may be missing for good because it was
// never started, hangs before it connects, or was refused by the store.
//
//   EK_ASSIGN_OR_RETURN(const ControlChannel::Parts all,
//                       AwaitArrival(comm.control(), "gloo addresses", mine, {.group = "world", .timeout = timeout}));
//
// Threads: blocks its caller.
// Errors:  as ControlChannel::Exchange(); DeadlineExceeded names the ranks that have not come.

#ifndef EVENKEEL_COMM_INTERNAL_ARRIVAL_H_
#define EVENKEEL_COMM_INTERNAL_ARRIVAL_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/internal/warn.h"

namespace evenkeel::internal {

struct Arrival {
  std::string group;  // For messages.
  absl::Duration timeout;
  WarnFunction warn = nullptr;
};

// Exchanges `mine` with all ranks, under a topic that the group has not used before. A rank that
// waits longer than kSilentWait logs which ranks are missing.
absl::StatusOr<ControlChannel::Parts> AwaitArrival(ControlChannel& control, absl::string_view topic, std::string mine,
                                                   const Arrival& arrival);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_ARRIVAL_H_
