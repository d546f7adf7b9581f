// Options of a single optimizer step.
//
//   EK_RETURN_IF_ERROR(optimizer->Step({.clip = ClipOptions{.max_norm = 1.0}}));
//   EK_RETURN_IF_ERROR(optimizer->Step({.grad_scale = 1 / scaler->scale(),
//                                       .skip_nonfinite = true}));
//
// All ranks must pass equal options; else the next step fails before it reduces a gradient, with
// the ranks and their values. Exhausted ranks use the options of the lowest active rank.

#ifndef EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_
#define EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_

#include <optional>

#include "evenkeel/zero_optim/gradient_check.h"

namespace evenkeel {

struct StepOptions {
  double grad_scale =
      1.0;            // A factor for the gradients, before they are clipped: one over a loss scale.
  bool skip = false;  // Changes neither parameters nor state nor step counts.
  // Scales the gradients of this optimizer, over all ranks of its group, down to this joint norm.
  std::optional<ClipOptions> clip;
  // Skips the step if any gradient on any rank of the group is infinite or not a number. Otherwise
  // such a gradient changes the weights. RefuseNonfinite() of gradient_check.h returns an error for
  // it.
  bool skip_nonfinite = false;
  friend bool operator==(const StepOptions&, const StepOptions&) = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_
