// Runs a training loop whose number of steps differs between ranks.
//
//   absl::Status status = RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
//     while (loader.Next(batch)) {
//       params.ClearGradients();
//       EK_RETURN_IF_ERROR(ddp->BeginStep());
//       ... forward, backward ...
//       EK_RETURN_IF_ERROR(ddp->FinishStep());
//       EK_RETURN_IF_ERROR(optimizer->Step());
//     }
//     return absl::OkStatus();           // this rank has run dry; the call returns when all ranks have
//   });
//
// A rank whose loop has returned shadows the others: it contributes nothing to the gradients, receives the reduced
// ones and takes the optimizer's step with them, so weights, moments and step counts are equal on all ranks after
// every step. Collectives of your own go through the scope (scope.h), so that dry ranks take part in them.
//
// Order:   every rank gives the same list, in any order: dry ranks follow the order in which the lowest active rank
//          uses the entries, also if it does not use all of them in every step.
// Threads: one RunJoined() at a time per communicator.
// Errors:  InvalidArgument: empty list, a null entry, one named twice, or different communicators.
//          FailedPrecondition: a RunJoined() is already running on this communicator.
//          FailedPrecondition on all ranks: their lists or options differ; a loop ended inside a step that it began.
//          OutOfRange: stopped early, all ranks in the same step (JoinOptions::min_active_ranks); the group goes on.
//          A Joinable that can't take part says so before the loop begins, and the group goes on.
//          An error of the loop is returned as it is and ends the group: other ranks get it with this rank's number and
//          step: "rank 1 failed in step 7 of its loop: INTERNAL: ...". Recover() (recovery.h) goes on after it.
//          So does an exception that leaves the loop: its text is reported to the other ranks, then it is rethrown.
//          FailedPrecondition on all ranks: an optimizer of the list did not step, although gradients were reduced.
// After it returns, however it returns, every Joinable is as it was before.

#ifndef EVENKEEL_JOIN_JOIN_H_
#define EVENKEEL_JOIN_JOIN_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/scope.h"

namespace evenkeel {

absl::Status RunJoined(absl::Span<Joinable* const> joinables, const JoinOptions& options,
                       absl::FunctionRef<absl::Status(JoinScope&)> loop);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_JOIN_H_
