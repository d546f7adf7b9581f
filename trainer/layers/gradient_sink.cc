#include "evenkeel/trainer/layers/gradient_sink.h"

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

int LowestTrained(const ParameterSet& parameters) {
  int index = 0;
  while (index < parameters.size() && !parameters.trainable(index)) ++index;
  return index;
}

bool CanHoldGradient(const Parameter& parameter) {
  const TensorView& grad = parameter.grad;
  return grad.data != nullptr && grad.count == parameter.value.count &&
         grad.dtype == parameter.value.dtype && grad.device == parameter.value.device;
}

}  // namespace

GradientSink::GradientSink(ParameterSet& parameters,
                           absl::FunctionRef<absl::Status(int)> on_gradient)
    : parameters_(parameters),
      on_gradient_(on_gradient),
      lowest_trained_(LowestTrained(parameters)) {}

absl::Status GradientSink::Check() const {
  for (int i = lowest_trained_; i < parameters_.size(); ++i) {
    if (!parameters_.trainable(i) || CanHoldGradient(parameters_[i])) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("backward: the gradient of ", parameters_[i].name, " needs ",
                     ToString(parameters_[i].value), " of memory, it has ",
                     parameters_[i].grad.data ? ToString(parameters_[i].grad) : "none"));
  }
  return absl::OkStatus();
}

absl::Status GradientSink::Announce(int index) {
  if (!parameters_.trainable(index)) return absl::OkStatus();
  parameters_.SetGradState(index, GradState::kLocal);
  return on_gradient_(index);
}

}  // namespace evenkeel
