// Updates each bucket's parameters as soon as its gradients are reduced, while backward goes on: the optimizer's work
// hides behind it, and no gradient outlives the step.
//
//   EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(&comm, &params, AdamW{.learning_rate = 3e-4}));
//   EK_ASSIGN_OR_RETURN(auto in_backward, UpdateInBackward(optimizer.get()));
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {}, std::move(in_backward)));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());
//     ... forward, backward ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());        // parameters are updated, their gradients none: no Step()
//   }
//
// With the same results as Step() after FinishStep(), bit for bit. `inner` says how gradients are reduced. Only steps
// that synchronise update; what was accumulated before goes into them.
//
// A part of the parameters: name them in `params`. The others keep their gradients, and Step() updates them as ever.
// Announce a gradient only when backward does not read that parameter's value any more: it changes from then on.
// Clipping, skipping, scaling by a loss scale, and all else that is for all gradients before the first update can't
// work: Step() and CheckGradients() refuse it, and Step() refuses altogether where there is nothing left to update.
//
// Uneven inputs: list the optimizer in RunJoined() as well. Dry ranks update likewise, with the settings of the lowest
//                active rank.
// Settings:  change a learning rate between steps, on all ranks alike; they are compared when the step begins.
// Devices:   buckets are updated on the reducer's stream, without the host. A bucket's parameters are all updated
//            there, or none: a bucket with some that are to keep their gradients is an error (Unimplemented).
// Failure:   a step that failed may have updated some parameters. Recover() (join/recovery.h) takes the state of a rank
//            that is in no such step, where there is one.
// Ownership: the optimizer outlives the reducer.
// Errors:    FailedPrecondition: the optimizer updates in backward already. InvalidArgument: `params` names one twice
//            or one that is not the optimizer's; or, when the reducer is made, `inner` does not say which gradients
//            exist before OnReduced() (UsedFlags::kSeparate), or leaves no gradients.

#ifndef EVENKEEL_ZERO_OPTIM_OPTIMIZER_IN_BACKWARD_H_
#define EVENKEEL_ZERO_OPTIM_OPTIMIZER_IN_BACKWARD_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {

struct InBackwardOptions {
  std::vector<int> params;                           // Empty: all of the optimizer's.
  std::unique_ptr<BucketReduction> inner = nullptr;  // Null means all-reduce.
};

absl::StatusOr<std::unique_ptr<BucketReduction>> UpdateInBackward(Optimizer* optimizer, InBackwardOptions options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_OPTIMIZER_IN_BACKWARD_H_
