// The optimizer state of some parameters, and the update of each: what sharded and unsharded optimizers have in common.
//
//   ParameterUpdater updater(&params, AdamW{});
//   updater.Update(3, params[3].grad, /*grad_scale=*/1.0);   // state appears with the first update
//
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {

class ParameterUpdater {
 public:
  // `params` must outlive it. Update() may only be used after Check() said OK.
  ParameterUpdater(const ParameterSet* params, UpdateRule rule);

  // InvalidArgument or Unimplemented: the rule or a parameter is not one that can be used.
  absl::Status Check() const;

  const UpdateRule& rule() const { return rule_; }
  absl::Status SetLearningRate(double learning_rate);
  // The settings of another rank's rule; InvalidArgument if it is of another kind or remembers something else.
  absl::Status Adopt(const UpdateRule& rule);

  void Update(int param, const TensorView& gradient, double grad_scale);

  int64_t state_bytes() const;
  int64_t step(int param) const { return slots_[param].step; }
  std::vector<StateTensor>& tensors(int param) { return slots_[param].tensors; }

  // Makes room for the state of a parameter after its update number `step`, which the caller then writes to tensors();
  // what is there stays. 0: forgets it.
  void Prepare(int param, int64_t step);

  OptimizerState Export() const;
  // InvalidArgument, which names the parameter, unless the state fits the parameters and the rule.
  absl::Status CheckState(const OptimizerState& state) const;
  // Takes over the entries for which `keeps` says so, and forgets what it had. The state must have passed CheckState().
  void Import(const OptimizerState& state, absl::FunctionRef<bool(int param)> keeps);

 private:
  struct Slot {
    int64_t step = 0;
    std::vector<StateTensor> tensors;  // In the order of StateTensorNames(); empty before the first update.
  };

  const ParameterSet* const params_;
  UpdateRule rule_;
  std::vector<Slot> slots_;  // By parameter.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_
