// Where a model's backward pass puts its gradients.
//
//   GradientSink sink(parameters, on_gradient);
//   ...
//   EK_RETURN_IF_ERROR(sink.Write<float>(weight, [&](GradTarget<float> to) { return WeightGradient(dy, to); }));
//   if (!sink.AnyTrainedBefore(weight)) return absl::OkStatus();   // nothing below is trained: no input gradient
//
// It hides the rules that a gradient lies where the parameter set says at this moment (a reducer may have pointed it
// into a bucket), that it is added to what is there unless its state is none, and that frozen parameters get none.
//
// Order:   parameter indices must grow in forward order; then the lowest trained index says how far backward goes.
// Threads: thread-compatible.
// Errors:  FailedPrecondition if a trained parameter's gradient has no memory of its value's kind on the CPU, and
//          whatever `on_gradient` answers.

#ifndef EVENKEEL_TRAINER_GRADIENT_SINK_H_
#define EVENKEEL_TRAINER_GRADIENT_SINK_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

// Memory for one gradient, and whether it is added to what lies there or overwrites it.
template <typename T>
struct GradTarget {
  T* data = nullptr;  // Null: this gradient is not wanted.
  bool add = false;

  explicit operator bool() const { return data != nullptr; }
};

class GradientSink {
 public:
  GradientSink(ParameterSet& parameters, absl::FunctionRef<absl::Status(int)> on_gradient);

  // Is a parameter with an index below `index` trained?
  bool AnyTrainedBefore(int index) const { return lowest_trained_ < index; }

  // All trained parameters have memory for a gradient of their own kind.
  absl::Status Check() const;

  // Where the gradient of `index` belongs; false if it is frozen.
  template <typename T>
  GradTarget<T> Target(int index) const {
    if (!parameters_.trainable(index)) return {};
    return {static_cast<T*>(parameters_[index].grad.data), parameters_.grad_state(index) != GradState::kNone};
  }

  // The gradient of `index` is written: marks it local and announces it. Nothing happens for a frozen one.
  absl::Status Announce(int index);

  // Target, `write`, Announce; nothing for a frozen parameter.
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
  int lowest_trained_;  // The set's size if none is.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GRADIENT_SINK_H_
