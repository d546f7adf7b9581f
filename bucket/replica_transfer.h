// Makes a state equal on all ranks, and finds damage: a bit that has flipped in the memory of a
// rank that has the state, or on the way. For Joinable::TakeOver().
//
//   absl::Status TakeOver(StateTransfer& transfer) override {
//     return TransferReplicas(
//         communicator(), transfer,
//         {.tensors = [&] { return NamedValuesOf(*params_); },
//          .move = [&](int source) {
//            return BroadcastState(*channel_, ValuesOf(*params_), source, Role::kState);
//          }});
//   }
//
// 1. The ranks that have the state (StateTransfer::holders) compare theirs. Those that differ from
//    the most frequent value receive it from one that does not, which becomes
//    StateTransfer::source; StateTransfer::repaired names them.
// 2. `move` sends it to all ranks. They compare; if it is not equal, it is sent again, twice at
//    most.
//
// Cost:    each rank reads its tensors two to three times; two exchanges of 24 bytes over the
//          control plane.
// Order:   a collective, with tensors of the same names in the same order.
// Threads: blocking.
// Errors:  DataLoss on all ranks: two holders differ, or no value is the most frequent one; or a
//          state does not arrive unchanged. It names the ranks by their numbers in the job. After
//          any error StateTransfer::is_torn says whether this rank has lost the state that it had.

#ifndef EVENKEEL_BUCKET_REPLICA_TRANSFER_H_
#define EVENKEEL_BUCKET_REPLICA_TRANSFER_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

struct ReplicaMove {
  // Returns the tensors; called again after `move`, which may allocate them.
  absl::FunctionRef<absl::StatusOr<std::vector<NamedView>>()> tensors;
  // Sends them from `source`, a rank of the group. A collective.
  absl::FunctionRef<absl::Status(int source)> move;
  StreamRef stream;
};

absl::Status TransferReplicas(Communicator& comm, StateTransfer& transfer,
                              const ReplicaMove& state);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REPLICA_TRANSFER_H_
