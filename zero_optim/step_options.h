// What may differ from one optimizer step to the next.
//
//   EK_RETURN_IF_ERROR(optimizer->Step({.grad_scale = clip_coefficient}));
//
// Every rank gives the same; ranks that have run out of inputs take over what the lowest active rank gave.

#ifndef EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_
#define EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_

namespace evenkeel {

struct StepOptions {
  double grad_scale = 1.0;  // Gradients are multiplied by it: clipping, or one over a loss scale.
  bool skip = false;        // Leave parameters and state as they are, the step counts too.
  friend bool operator==(const StepOptions&, const StepOptions&) = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_STEP_OPTIONS_H_
