// Goes on with the ranks that are left when one is lost.
//
//   while (step < last_step) {
//     absl::Status status = TrainFrom(step, *comm, ddp, optimizer);      // a loop, or RunJoined()
//     if (status.ok()) break;
//     EK_ASSIGN_OR_RETURN(Recovered recovered, Recover({&ddp, &optimizer}, *comm, {}));
//     comm = std::move(recovered.comm);                                    // the new group; now the old one may go
//     step = recovered.steps;                                              // the interrupted step is repeated
//   }
//
// The survivors agree over the control plane who they are and which step was the last that all of them finished;
// parameters, buffers and optimizer state come from the lowest survivor that is at that step. Joinables keep their
// memory, their plans and their registrations; gradients become none.
//
// Order:   every survivor calls it, with the same Joinables, after the group has ended by a failure, outside of
//          RunJoined().
// Errors:  FailedPrecondition: the group has not failed; a Joinable can't go on without the lost rank (the sharded
//          optimizer, unless told how). Then nobody goes on: the new group ends with that sentence on every survivor.
//          DeadlineExceeded names the ranks that have neither come nor gone.
//          Unavailable: who held the group together is gone too (rank 0 hosted the store): use tools:launch.

#ifndef EVENKEEL_JOIN_RECOVERY_H_
#define EVENKEEL_JOIN_RECOVERY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

struct RecoveryOptions {
  absl::Duration timeout = absl::Minutes(2);
  // Optimizer steps that this rank has finished; -1: as the list's optimizers have counted them. Needed where no
  // optimizer is in the list.
  int64_t steps = -1;
};

struct Recovered {
  std::unique_ptr<Communicator> comm;
  int64_t steps = 0;       // That all survivors have finished: where to go on.
  std::vector<int> lost;   // Ranks of the old group.
  int source = 0;          // Whose state all have now: its rank in the new group.
};

absl::StatusOr<Recovered> Recover(absl::Span<Joinable* const> joinables, Communicator& failed,
                                  const RecoveryOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_RECOVERY_H_
