// Goes on with the ranks that are left when one is lost, or with all when one of them had an error.
//
//   while (step < last_step) {
//     absl::Status status = TrainFrom(step, *comm, *ddp, *optimizer);    // a loop, or RunJoined()
//     if (status.ok()) break;
//     EK_ASSIGN_OR_RETURN(Recovered recovered, Recover({ddp.get(), optimizer.get()}, *comm, {.why = status}));
//     if (recovered.lost.empty()) return status;                           // an error that would come again
//     comm = std::move(recovered.comm);                                    // the new group; now the old one may go
//     step = recovered.steps;                                              // the interrupted step is repeated
//   }
//
// The survivors agree over the control plane who they are and which step was the last that all of them finished;
// parameters, buffers and optimizer state come from the lowest survivor that is at that step. Joinables keep their
// memory, their plans and their names; gradients become none. Buffers are those with which the step to be repeated
// began. If all who are at that step are in the middle of something (an update, two optimizers of which one has
// stepped), the next step that a survivor has finished counts.
//
// A state can't be taken back where each rank has its own part of it: see LostShard of zero_optim/sharded_optimizer.h.
// An optimizer of your own, outside of the list: name its state with DataParallel::SetOptimizerState(), on all ranks
// alike, and say in the options how many steps you have done.
//
// Order:   every survivor calls it, with the same Joinables in any order, outside of RunJoined().
// Errors:  FailedPrecondition: the group has not failed; a Joinable can't go on without the lost rank (the sharded
//          optimizer, unless told how); nobody has a whole state. Then nobody goes on: the new group ends with that
//          sentence on every survivor.
//          DeadlineExceeded names the ranks that have neither come nor gone.
//          Unavailable: who held the group together is gone too (rank 0 hosted the store): use tools:launch.
//          Aborted: the other ranks have declared this one lost and go on without it. It must not write to their files.
//          After an error the Joinables can be destroyed, or given to Recover() once more with the same `failed`.
// A rank that is lost while the others recover is left behind too: they begin anew without it.

#ifndef EVENKEEL_JOIN_RECOVERY_H_
#define EVENKEEL_JOIN_RECOVERY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

struct RecoveryOptions {
  // For all of it, begun anew or not; operations that carry the state have the group's own deadline.
  absl::Duration timeout = absl::Minutes(2);
  // Optimizer steps that this rank has finished; -1: as the list's optimizers have counted them, which must be equal.
  // Needed where no optimizer is in the list, or where several do not step equally often.
  int64_t steps = -1;
  // What this rank's loop ended with. If the others do not know yet, because the error was this rank's own and it has
  // not ended the group, they learn it. OK: the group must have ended.
  absl::Status why;
};

struct Recovered {
  std::unique_ptr<Communicator> comm;
  int64_t steps = 0;      // That all survivors have finished now: where to go on.
  std::vector<int> lost;  // Ranks of the old group.
  int source = 0;         // Whose state all have now: its rank in the new group.
};

absl::StatusOr<Recovered> Recover(absl::Span<Joinable* const> joinables, Communicator& failed,
                                  const RecoveryOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_RECOVERY_H_
