// What may differ from one optimizer step to the next.
//
//   EK_RETURN_IF_ERROR(optimizer->Step({.clip = ClipOptions{.max_norm = 1.0}}));
//   EK_RETURN_IF_ERROR(optimizer->Step({.grad_scale = 1 / scaler->scale(), .skip_nonfinite = true}));
//
// All ranks must pass the same options; else the next step fails before it reduces anything, with an error that names
// ranks and values. Ranks that have run out of inputs take over the options of the lowest active rank.

#ifndef EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_
#define EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_

#include <optional>

#include "evenkeel/zero_optim/gradient_check.h"

namespace evenkeel {

struct StepOptions {
  double grad_scale = 1.0;  // Gradients are multiplied by it, before they are clipped: one over a loss scale.
  bool skip = false;        // Leave parameters and state as they are, the step counts too.
  // Gradients whose joint norm is larger are scaled down to it; those of this optimizer, over all ranks of its group.
  std::optional<ClipOptions> clip;
  // Do what `skip` does if any gradient on any rank of the group is infinite or not a number. Without it such a
  // gradient goes into the weights. RefuseNonfinite() of gradient_check.h makes an error of it.
  bool skip_nonfinite = false;
  friend bool operator==(const StepOptions&, const StepOptions&) = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_
