// Writes the gradients of a model's backward pass to the memory that the parameter set names.
//
//   GradientSink sink(parameters, on_gradient);
//   ...
//   EK_RETURN_IF_ERROR(sink.Write<float>(weight, [&](GradTarget<float> to) {
//     return WeightGradient(dy, to);
//   }));
//   // nothing below is trained: no input gradient
//   if (!sink.AnyTrainedBefore(weight)) return absl::OkStatus();
//
// It implements three rules: a gradient lies where the parameter set points at this moment (a
// reducer may have moved it into a bucket), it is added to the present values unless its state is
// none, and frozen parameters get none.
//
// Order:   parameter indices must grow in forward order; the lowest trained index then determines
//          where backward ends.
// Threads: thread-compatible.
// Errors:  FailedPrecondition if a trained parameter's gradient has no memory of its value's kind
//          on the CPU; errors of `on_gradient`.

#ifndef EVENKEEL_TRAINER_LAYERS_GRADIENT_SINK_H_
#define EVENKEEL_TRAINER_LAYERS_GRADIENT_SINK_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/layers/grad_target.h"

namespace evenkeel {

class GradientSink {
 public:
  GradientSink(ParameterSet& parameters, absl::FunctionRef<absl::Status(int)> on_gradient);

  // Returns whether a parameter with an index below `index` is trained.
  bool AnyTrainedBefore(int index) const { return lowest_trained_ < index; }

  // Returns an error unless all trained parameters have memory for a gradient of their own kind.
  absl::Status Check() const;

  // Returns the memory for the gradient of `index`; an empty target if the parameter is frozen.
  template <typename T>
  GradTarget<T> Target(int index) const {
    if (!parameters_.trainable(index)) return {};
    return {static_cast<T*>(parameters_[index].grad.data),
            parameters_.grad_state(index) != GradState::kNone};
  }

  // Marks the gradient of `index`, which has been written, as local and announces it. Does nothing
  // for a frozen parameter.
  absl::Status Announce(int index);

  // Calls Target, `write` and Announce; does nothing for a frozen parameter.
  template <typename T, typename Writer>
  absl::Status Write(int index, Writer write) {
    GradTarget<T> target = Target<T>(index);
    if (!target) return absl::OkStatus();
    EK_RETURN_IF_ERROR(write(target));
    return Announce(index);
  }

 private:
  ParameterSet& parameters_;
  const absl::FunctionRef<absl::Status(int)> on_gradient_;
  int lowest_trained_;  // The size of the set if no parameter is trained.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_GRADIENT_SINK_H_
