// Update rules: SGD, Adam and AdamW, as PyTorch defines them.
//
//   UpdateRule rule = AdamW{.learning_rate = 3e-4};
//   // StateTensorNames(rule) == {"exp_avg", "exp_avg_sq"}: of the parameter's size, initially zero
//   ApplyUpdate(rule, /*step=*/1, /*grad_scale=*/1.0, value, gradient,
//               {first_moment, second_moment});
//
// An update is a single pass over the memory. Optimizers call it per parameter.
//
// Rounding: in the state's type and PyTorch's order of operations; coefficients, bias corrections
//           included, are computed in double and rounded once. A product and a sum are fused where
//           PyTorch's loops for AVX2 fuse them, and nowhere else, so all processors give the same
//           bits. A parameter of 16 bits is rounded from its float32 master copy.
// Units:    `step` counts the updates of the parameter, from 1.
// Threads:  pure functions on the caller's memory.
// Source:   torch::optim 2.15 (SGD with dampening 0, Adam and AdamW without amsgrad).

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

  static void VisitFields(auto& self, auto& visit) {
    visit(self.learning_rate, self.momentum, self.weight_decay, self.nesterov);
  }
  friend bool operator==(const Sgd&, const Sgd&) = default;
};

struct Adam {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;  // Added to the gradient (L2).

  static void VisitFields(auto& self, auto& visit) {
    visit(self.learning_rate, self.beta1, self.beta2, self.epsilon, self.weight_decay);
  }
  friend bool operator==(const Adam&, const Adam&) = default;
};

struct AdamW {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 1e-2;  // Shrinks the parameter itself (decoupled).

  static void VisitFields(auto& self, auto& visit) {
    visit(self.learning_rate, self.beta1, self.beta2, self.epsilon, self.weight_decay);
  }
  friend bool operator==(const AdamW&, const AdamW&) = default;
};

using UpdateRule = std::variant<Sgd, Adam, AdamW>;

// Returns InvalidArgument with the first setting that is out of range.
absl::Status Validate(const UpdateRule& rule);

double LearningRate(const UpdateRule& rule);
void SetLearningRate(UpdateRule& rule, double learning_rate);

// Returns the shortest text that reads as the same number, so that settings with equal texts are
// equal.
std::string SettingText(double value);

// Returns all settings with all their digits: "AdamW(learning_rate=0.001, beta1=0.9, beta2=0.999,
// epsilon=1e-08, weight_decay=0.01)".
std::string ToString(const UpdateRule& rule);

// Returns the names of the rule's state tensors, in the order of ApplyUpdate(); at most
// kMaxStateTensors. A parameter of 16 bits also has "master", the value before rounding, from which
// each update continues; the first update copies it from the parameter. So a later write to such a
// parameter lasts for one step only.
std::span<const absl::string_view> StateTensorNames(const UpdateRule& rule,
                                                    DType dtype = DType::kFloat32);
inline constexpr int kMaxStateTensors = 3;

// Returns OK for floats on the CPU, and float32 and bfloat16 on a device; else Unimplemented.
absl::Status CheckUpdatable(const TensorView& value);

// Updates `value` and `state` by `gradient` * `grad_scale`, on the CPU. All have one size. `value`
// and `gradient` have one type, which CheckUpdatable() passes, and the states its StateDType(). On
// a device an Optimizer applies the same rule by kernels.
void ApplyUpdate(const UpdateRule& rule, int64_t step, double grad_scale, const TensorView& value,
                 const TensorView& gradient, absl::Span<const TensorView> state);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_UPDATE_RULE_H_
