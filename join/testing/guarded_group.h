// Groups of ranks on simulated devices whose memory the host may not touch: the process ends where
// it does.
//
//   absl::Status status =
//       RunGuardedRanks(/*world_size=*/3, [](Communicator& comm) -> absl::Status { ... });
//
// Rank r is on device r. Collectives copy to the host and back on a stream, as a transport without
// a device's would, and add in rank order. A device's work has run when the call that puts it there
// returns, so orders are not tested here.
//
// Threads: as RunRanks() of comm/local/local.h.

#ifndef EVENKEEL_JOIN_TESTING_GUARDED_GROUP_H_
#define EVENKEEL_JOIN_TESTING_GUARDED_GROUP_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

absl::Status RunGuardedRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_TESTING_GUARDED_GROUP_H_
