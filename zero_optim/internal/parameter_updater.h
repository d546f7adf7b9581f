// The optimizer state of some parameters, and the update of each: what sharded and unsharded optimizers have in common.
//
//   ParameterUpdater updater(&params, groups);
//   updater.Update(3, params[3].grad, /*grad_scale=*/1.0);   // state appears with the first update
//
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {

class ParameterUpdater {
 public:
  // `params` must outlive it. Update() may only be used after Check() said OK.
  ParameterUpdater(const ParameterSet* params, ParameterGroups groups);

  // InvalidArgument or Unimplemented: a parameter is not one that can be used.
  absl::Status Check() const;
  // InvalidArgument names a parameter in a group whose gradient consists of rows.
  absl::Status CheckDense() const;

  const ParameterGroups& groups() const { return groups_; }
  ParameterGroups& groups() { return groups_; }

  // Of a parameter's elements, those that are updated here, and whose state is.
  struct Part : StateRange {
    std::vector<StateTensor> tensors;
  };
  StateRange range(int param) const { return slots_[param].part; }  // The whole parameter, unless it was set.
  // Goes on with that range and, after a first update, a state of zeros; answers what was here. The step count stays.
  Part SetPart(int param, int64_t begin, int64_t count);
  void PutBack(int param, Part part) { slots_[param].part = std::move(part); }

  // For parameters in a group. The gradient is that of the range.
  void Update(int param, const TensorView& gradient, double grad_scale);

  int64_t state_bytes() const;
  int64_t step(int param) const { return slots_[param].step; }
  std::vector<StateTensor>& tensors(int param) { return slots_[param].part.tensors; }

  // Makes room for the state of a parameter after its update number `step`, which the caller then writes to tensors();
  // what is there stays. 0: forgets it.
  void Prepare(int param, int64_t step);

  // Of the ranges that are here.
  OptimizerState Export() const;
  StatePieces Pieces();
  // InvalidArgument, which names the parameter, unless the state fits the parameters and the rule.
  absl::Status CheckState(const OptimizerState& state) const;
  // The same of a state whose tensors have just the elements of such a range.
  absl::Status CheckParts(const OptimizerState& parts, absl::FunctionRef<StateRange(int param)> range_of) const;
  // Takes over its ranges of the entries for which `keeps` says so, and forgets what it had. The state must have passed
  // CheckState().
  void Import(const OptimizerState& state, absl::FunctionRef<bool(int param)> keeps);
  // Goes on with these ranges of all parameters, and this state of them, which must have passed CheckParts().
  void ImportParts(OptimizerState parts, absl::FunctionRef<StateRange(int param)> range_of);

 private:
  void UpdateRows(int param, const TensorView& elements, double grad_scale);
  std::span<const absl::string_view> NamesFor(int param) const { return StateTensorNames(groups_.rule_of(param)); }

  std::vector<StateTensor> ZerosFor(int param) const;

  struct Slot {
    int64_t step = 0;
    Part part;  // Its tensors in the order of StateTensorNames() of the rule; none before the first update.
  };

  const ParameterSet* const params_;
  ParameterGroups groups_;
  std::vector<Slot> slots_;  // By parameter.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_
