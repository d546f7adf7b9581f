// Runs a training loop whose number of steps differs between ranks.
//
//   absl::Status status = RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) {
//     while (loader.Next(batch)) {
//       params.ClearGradients();
//       EK_RETURN_IF_ERROR(ddp->BeginStep());
//       ... forward, backward ...
//       EK_RETURN_IF_ERROR(ddp->FinishStep());
//       EK_RETURN_IF_ERROR(optimizer->Step());
//     }
//     return absl::OkStatus();  // this rank is exhausted; the call returns when all ranks are
//   });
//
// A rank whose loop has returned shadows the others: it contributes nothing to the gradients,
// receives the reduced ones and takes the optimizer's step with them, so that weights, moments and
// step counts are equal on all ranks after every step. Issue your own collectives through the scope
// (scope.h), so that exhausted ranks take part in them.
//
// Order:   every rank passes the same list, in any order: exhausted ranks use the entries in the
//          order of the lowest active rank, which need not use all of them in every step.
// Threads: one RunJoined() at a time per communicator.
// Errors:  InvalidArgument: an empty list, a null or repeated entry, or different communicators.
//          FailedPrecondition: a RunJoined() is running on this communicator.
//          FailedPrecondition on all ranks: their lists or options differ; a loop ended inside a
//          step; or an optimizer of the list did not step although gradients were reduced.
//          OutOfRange on all ranks: stopped early (JoinOptions::min_active_ranks), all in the same
//          step; the group remains usable.
//          A Joinable that cannot take part reports its error before the loop begins, and the group
//          remains usable. An error of the loop is returned unchanged and ends the group: the other
//          ranks return it as "rank 1 failed in step 7 of its loop: ...", without its code. So does
//          an exception that leaves the loop: its text is sent to the other ranks, then it is
//          rethrown. Recover() (recovery.h) can continue after both.
// After RunJoined() has returned, every Joinable is as it was before.

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
