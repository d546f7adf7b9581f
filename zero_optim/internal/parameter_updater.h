// The optimizer state of some parameters, and the update of each: what sharded and unsharded
// optimizers have in common.
//
//   ParameterUpdater updater(&params, groups);
//   updater.Update(3, params[3].grad, /*grad_scale=*/1.0);   // state appears with the first update
//
// On a device (the group's runtime is there, the parameters lie on it) a step's updates are one
// call, which puts work on a stream and does not wait:
//
//   // state appears with the first of them
//   EK_RETURN_IF_ERROR(updater.SetGradients(0, gradients, stream));
//   // if the step clips, or may be skipped
//   EK_RETURN_IF_ERROR(updater.MeasureThere(0, norm, stream));
//   EK_RETURN_IF_ERROR(updater.PrepareThere(0, options, is_measured, stream));
//   EK_RETURN_IF_ERROR(updater.ApplyThere(0, stream));
//
// Steps:   where the device's measurement may skip a step, only the device has the step counts:
//          Refresh(), before step(), waits for them, and drops the state of parameters that were
//          never updated.
// Streams: state is used on the parameters' stream; a use on another stream must be ordered after
//          it.
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/device/device_update.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/held_tensor.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {

class ParameterUpdater {
 public:
  // `params` must outlive it. Update() may only be used after Check() has returned OK. `runtime`:
  // the group's; null on the CPU.
  ParameterUpdater(const ParameterSet* params, ParameterGroups groups,
                   DeviceRuntime* runtime = nullptr);
  ~ParameterUpdater();

  // InvalidArgument or Unimplemented: a parameter cannot be used. FailedPrecondition: it lies on a
  // device that the group cannot use.
  absl::Status Check();
  // InvalidArgument names a parameter in a group whose gradient consists of rows.
  absl::Status CheckDense() const;

  const ParameterGroups& groups() const { return groups_; }
  ParameterGroups& groups() { return groups_; }

  // The range of a parameter's elements with state and updates on this rank.
  struct Part : StateRange {
    std::vector<HeldTensor> tensors;
  };
  StateRange range(int param) const {
    return slots_[param].part;
  }  // The whole parameter, unless it was set.
  // Sets the range and, after a first update, a state of zeros. Returns the previous part. The step
  // count stays.
  absl::StatusOr<Part> SetPart(int param, int64_t begin, int64_t count);
  void PutBack(int param, Part part);
  // Frees the state of a part that is no longer needed.
  void Drop(Part part);
  // Returns zeros for the range, a tensor for each of the state's.
  absl::StatusOr<std::vector<HeldTensor>> NewTensors(int param) const;

  // For parameters in a group, on the CPU. The gradient is that of the range.
  void Update(int param, const TensorView& gradient, double grad_scale);

  // On a device.
  bool is_on_device() const { return runtime_ != nullptr; }
  StreamRef stream() const { return is_on_device() ? params_->stream() : StreamRef(); }
  DeviceUpdate& device() { return *device_; }
  struct Gradient {
    int param = 0;
    TensorView elements;  // The range's.
    int flag = -1;        // Among those of PrepareThere().
  };
  // `list`: any number; use the same one for gradients that mostly stay the same from step to step.
  absl::Status SetGradients(int list, absl::Span<const Gradient> gradients, StreamRef stream);
  // Prepares an update of the parameters of `list`: counts the step and decides whether to skip it.
  // `flags`, if any: whether any rank has a gradient. `may_be_unset`: a flag may be 0, as far as
  // this rank knows.
  absl::Status PrepareThere(int list, const StepOptions& options, bool is_measured,
                            StreamRef stream, const TensorView& flags = {},
                            bool may_be_unset = false);
  absl::Status ApplyThere(int list, StreamRef stream);
  absl::Status MeasureThere(int list, double norm, StreamRef stream);
  // Measures gradients without making state. `add_up` adds the measurements of other ranks. The
  // host waits.
  absl::StatusOr<GradientCheck> MeasureNow(absl::Span<const Gradient> gradients, double norm,
                                           double grad_scale,
                                           absl::FunctionRef<absl::Status()> add_up);
  // Frees the memory when the work that is on stream() now has run.
  absl::Status Keep(Memory memory) {
    return is_on_device() ? device_->Keep(std::move(memory), stream()) : absl::OkStatus();
  }
  // Fetches the step counts from the device, if it has newer ones; the host then waits.
  absl::Status Refresh();

  // Copies between any two of the CPU and the device, on stream(); on the CPU at once.
  absl::Status Copy(const TensorView& to, const TensorView& from);
  // The same; the host waits, and `to` and `from` may be freed afterwards, also after an error.
  absl::Status CopyNow(const TensorView& to, const TensorView& from);
  // Waits, on the host, for the work on stream().
  absl::Status Synchronize();

  int64_t state_bytes() const;
  int64_t step(int param) const { return slots_[param].step; }
  std::vector<HeldTensor>& tensors(int param) { return slots_[param].part.tensors; }
  // Returns the state tensors and the step counts of all parameters: "fc1.weight: exp_avg". The
  // tensors of a parameter without state are empty. On a device the host waits for the counts.
  absl::StatusOr<std::vector<NamedView>> NamedState();

  // Makes room for the state of a parameter after its update number `step`, which the caller then
  // writes to tensors(); existing tensors stay. 0: drops the state.
  absl::Status Prepare(int param, int64_t step);

  // Returns the pieces of this rank's ranges. On a device the host waits, and the pieces are
  // copies.
  absl::StatusOr<OptimizerState> Export();
  absl::StatusOr<StatePieces> Pieces();
  // By parameter: the elements in the tensors of a state; nullopt: the state has no entry.
  using Ranges = std::vector<std::optional<StateRange>>;
  // InvalidArgument, which names the parameter, unless the state fits these ranges and the rule.
  absl::Status CheckState(const OptimizerState& state, const Ranges& ranges) const;
  // Replaces the state by this rank's ranges of the entries for which `keeps` returns true.
  // `state` must have passed CheckState(), and have all elements of these ranges. `movable`: null,
  // or `state` itself, if its tensors may be taken instead of copied.
  absl::Status Import(const OptimizerState& state, const Ranges& ranges, OptimizerState* movable,
                      absl::FunctionRef<bool(int param)> keeps);

 private:
  void UpdateRows(int param, const TensorView& elements, double grad_scale);
  std::span<const absl::string_view> NamesFor(int param) const {
    return StateTensorNames(groups_.rule_of(param), (*params_)[param].value.dtype);
  }

  absl::Status MakeState(int param);  // Zeros.
  absl::Status CheckDevice();
  std::vector<DeviceUpdateItem> ItemsFor(absl::Span<const Gradient> gradients,
                                         std::vector<TensorView>& state);

  struct Slot {
    int64_t step = 0;
    Part part;  // Its tensors in the order of StateTensorNames() of the rule; none before the first
                // update.
  };

  const ParameterSet* const params_;
  ParameterGroups groups_;
  DeviceRuntime* const runtime_;
  std::vector<Slot> slots_;  // By parameter.

  // On a device.
  std::vector<std::vector<int>> listed_;  // The parameters of each list.
  bool device_knows_better_ = false;      // The steps of the slots may be too large.
  bool device_must_know_ = false;         // They were set on the host.
  std::unique_ptr<DeviceUpdate> device_;  // Last: its destructor waits for uses of the rest.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PARAMETER_UPDATER_H_
