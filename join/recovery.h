// Continues training after a rank is lost: with the surviving ranks, or with a newcomer in its
// place; or with all ranks after an error.
//
//   int64_t step = 0;
//   if (comm->waiting()) {                       // this process takes the place of a lost rank
//     EK_ASSIGN_OR_RETURN(Recovered entered, Enter({ddp.get(), optimizer.get()}, *comm));
//     comm = std::move(entered.comm);
//     step = entered.steps;
//   }
//   while (true) {
//     absl::Status status = TrainFrom(step, *comm, *ddp, *optimizer);    // a loop, or RunJoined()
//     if (status.ok()) status = comm->Finalize();     // a loss here is recovered, too
//     if (status.ok()) break;
//     EK_ASSIGN_OR_RETURN(
//         Recovered recovered,
//         Recover({ddp.get(), optimizer.get()}, *comm,
//                 {.wait_for_replacement = absl::Seconds(10), .why = status}));
//     if (recovered.lost.empty()) return status;  // the error would recur
//     comm = std::move(recovered.comm);  // the new group; the old one may be destroyed now
//     step = recovered.steps;  // the interrupted step is repeated
//   }
//
// The survivors agree over the control plane on their ranks and on the last step that all of them
// have finished; parameters, the set of trained ones as the program has set it last, buffers and
// optimizer state come from the lowest survivor that is at that step. Joinables keep their memory,
// their plans and their names; the gradients' state becomes kNone. Buffers are those with which the
// step to be repeated began. If every rank at that step is in the middle of a change (an update, or
// one of two optimizers has stepped), the next step that a survivor has finished counts.
//
// With wait_for_replacement, the survivors wait for a process that is started with the lost rank's
// variables and EVENKEEL_NEWCOMER; `launch --on_failure=replace` starts it. It makes the same
// Joinables, in the same order, over a communicator that is waiting(), and calls Enter(): it
// receives all of their state. docs/replacement.md has the protocol, and the requirements on a
// program.
//
// Parameters and optimizer state are compared before they are sent, and with buffers afterwards: of
// three or more ranks that have the state of the step, one that differs receives that of the
// others, and state that arrives with an error is sent again (bucket/replica_transfer.h).
//
// Split state cannot be taken back: see LostShard in zero_optim/lost_shard.h. For your own
// optimizer outside of the list, name its state with DataParallel::SetOptimizerState() on all
// ranks, and set RecoveryOptions::steps.
//
// Order:   every survivor calls it, with the same Joinables in any order, outside of RunJoined().
// Errors:  FailedPrecondition: the group has not failed; a Joinable cannot continue without the
//          lost rank (an optimizer with split state, by default); or no rank has a complete state.
//          Then the new group ends with this error on every survivor. DeadlineExceeded names the
//          ranks that neither called it nor left. Unavailable: the process that held the group
//          together is lost, too (rank 0 hosted the store): use tools:launch. Aborted: the other
//          ranks have declared this one lost and continue without it; it must not write to their
//          files. DataLoss: replicas differ, and none is known to be right. After an error the
//          Joinables can be destroyed, or passed to Recover() again with the same `failed`.
//          Enter(): FailedPrecondition or InvalidArgument: this newcomer is refused, because it is
//          late, a newer one has come, or its Joinables differ from the survivors'; the message
//          shows both sides. The survivors continue.
// If another rank is lost meanwhile, the survivors regroup again.

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
  // Limit of the whole call, with all its attempts, without the wait for newcomers; operations that
  // carry the state have the group's own deadline. For Enter(), from the start of the wait for the
  // loss of its rank.
  absl::Duration timeout = absl::Minutes(2);
  // For how long the survivors wait for a newcomer in the place of each lost rank
  // (RegroupOptions in comm/communicator.h). 0: the group goes on without them.
  absl::Duration wait_for_replacement = absl::ZeroDuration();
  // The optimizer steps that this rank has finished; -1: the counts of the optimizers in the list,
  // which must be equal. Needed if no optimizer is in the list, or if several step at different
  // rates.
  int64_t steps = -1;
  // The error with which this rank's loop ended. If the group has not ended yet, Recover() aborts
  // it with this error. OK: the group must have ended.
  absl::Status why;
};

struct Recovered {
  std::unique_ptr<Communicator> comm;
  int64_t steps = 0;         // The steps that all survivors have finished; continue from here.
  std::vector<int> lost;     // Ranks of the old group whose processes are gone; for a newcomer, of
                             // the job's first group.
  std::vector<int> entered;  // Ranks of the new group that are newcomers.
  int source = 0;            // The rank, in the new group, whose state all have now.
  // Damage that was found and repaired, for your log: a bit that had flipped in the memory of a
  // rank or on its way. Ranks have their numbers in the job.
  std::vector<std::string> repaired;
};

absl::StatusOr<Recovered> Recover(absl::Span<Joinable* const> joinables, Communicator& failed,
                                  const RecoveryOptions& options = {});

// The call of a newcomer. `waiting`: the communicator of CreateCommunicator(). Of the options only
// the timeout counts.
absl::StatusOr<Recovered> Enter(absl::Span<Joinable* const> joinables, Communicator& waiting,
                                const RecoveryOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_RECOVERY_H_
