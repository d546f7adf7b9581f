// How an optimizer turns a gradient into a new parameter: SGD, Adam and AdamW, as PyTorch defines them.
//
//   UpdateRule rule = AdamW{.learning_rate = 3e-4};
//   // StateTensorNames(rule) == {"exp_avg", "exp_avg_sq"}: as many elements as the parameter each, zero at first
//   ApplyUpdate(rule, /*step=*/1, /*grad_scale=*/1.0, value, gradient, {first_moment, second_moment});
//
// One pass over the memory does everything. Optimizers (optimizer.h, sharded_optimizer.h) call it per parameter.
//
// Rounding: in the parameter's type and PyTorch's order of operations; coefficients, bias corrections included, are
//           computed in double and rounded once. Every processor gives the same bits: nothing is contracted.
// Units:    `step` counts this parameter's updates and is 1 in its first.
// Threads:  pure functions on the caller's memory.
// Source:   torch.optim 1.13 (SGD with dampening 0, Adam and AdamW without amsgrad).

#ifndef EVENKEEL_ZERO_OPTIM_UPDATE_RULE_H_
#define EVENKEEL_ZERO_OPTIM_UPDATE_RULE_H_

#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct Sgd {
  double learning_rate = 1e-2;
  double momentum = 0.0;
  double weight_decay = 0.0;  // Added to the gradient (L2).
  bool nesterov = false;      // Needs momentum.
  friend bool operator==(const Sgd&, const Sgd&) = default;
};

struct Adam {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;  // Added to the gradient (L2).
  friend bool operator==(const Adam&, const Adam&) = default;
};

struct AdamW {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 1e-2;  // Shrinks the parameter itself (decoupled).
  friend bool operator==(const AdamW&, const AdamW&) = default;
};

using UpdateRule = std::variant<Sgd, Adam, AdamW>;

// InvalidArgument names the first setting that is out of its range.
absl::Status Validate(const UpdateRule& rule);

double LearningRate(const UpdateRule& rule);
void SetLearningRate(UpdateRule& rule, double learning_rate);

// Every setting with all its digits: "AdamW(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08,
// weight_decay=0.01)".
std::string ToString(const UpdateRule& rule);

// What the rule remembers of each parameter, in the order that ApplyUpdate() takes it: at most kMaxStateTensors. Of a
// parameter in 16 bits that is also "master", what its value was rounded from: it is the value that a step goes on from,
// and begins as the parameter is at its first update. So who writes such a parameter later changes it for one step only.
std::span<const absl::string_view> StateTensorNames(const UpdateRule& rule, DType dtype = DType::kFloat32);
inline constexpr int kMaxStateTensors = 3;

// OK for float32 and float64 on the CPU, and float32 and bfloat16 on a device; else Unimplemented.
absl::Status CheckUpdatable(const TensorView& value);

// Updates `value` and `state` by `gradient` * `grad_scale`, on the CPU. All have one size and a type that
// CheckUpdatable() passes. On a device: device/device_update.h.
void ApplyUpdate(const UpdateRule& rule, int64_t step, double grad_scale, const TensorView& value,
                 const TensorView& gradient, absl::Span<const TensorView> state);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_UPDATE_RULE_H_
