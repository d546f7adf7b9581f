// The factor by which a loss is multiplied, so that small gradients do not vanish in half precision: halved when
// gradients overflow, doubled after many steps in which they did not.
//
//   EK_ASSIGN_OR_RETURN(auto scaler, LossScaler::Create(&comm));
//   for (...) {
//     ... backward of loss * scaler->scale() ...
//     EK_RETURN_IF_ERROR(optimizer->Step({.grad_scale = 1 / scaler->scale(), .skip_nonfinite = true}));
//     EK_RETURN_IF_ERROR(scaler->Update(!optimizer->last_check()->is_finite));
//   }
//
// An optimizer's check is agreed over its group: what is not finite on one rank is so for all, and all skip the step.
// If ranks beyond that group share the scale (tensor parallel), let them agree first: CheckGradients(), then
// Communicator::AgreeAny() of the larger group, then Step({.skip = any}) and Update(any). So with several optimizers.
// SlicedOptimizer has no CheckGradients(): with it only the loop above will do.
//
// Devices: last_check() waits for the step. check_before() is of the step before it, which a device has mostly done by
//          then, so that the host does not wait; the scale then follows one step later, and two steps in a row may be
//          left out where one would have been:
//            EK_RETURN_IF_ERROR(scaler->Update(optimizer->check_before().has_value() &&
//                                              !optimizer->check_before()->is_finite));
// Join:    ranks without inputs follow; put it into RunJoined()'s list, too.
// Order:   Update() once per step, on all ranks that have inputs, with the same word.
// Threads: thread-compatible.
// Source:  torch.cuda.amp.GradScaler (its defaults); a least scale as in Megatron-LM.

#ifndef EVENKEEL_ZERO_OPTIM_LOSS_SCALER_H_
#define EVENKEEL_ZERO_OPTIM_LOSS_SCALER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

struct LossScalerOptions {
  double initial_scale = 65536;
  double growth_factor = 2;        // At least 1.
  double backoff_factor = 0.5;     // Above 0, below 1.
  int64_t growth_interval = 2000;  // Good steps in a row, before it grows.
  double least_scale = 1;          // It does not fall below.
  double largest_scale = 1 << 30;  // It does not grow beyond.
  friend bool operator==(const LossScalerOptions&, const LossScalerOptions&) = default;
};

// To save and load.
struct LossScalerState {
  double scale = 1;
  int64_t good_steps = 0;  // Since it last changed.
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;

  std::string Serialize() const;
  // InvalidArgument for what Serialize() of a state in use can't have made.
  static absl::StatusOr<LossScalerState> Parse(absl::string_view bytes);
};

// What a step makes of it. A pure function.
LossScalerState NextScale(const LossScalerOptions& options, LossScalerState state, bool found_nonfinite);

class LossScaler : public Joinable {
 public:
  // All ranks together; InvalidArgument on all if an option is out of its range or the ranks differ.
  static absl::StatusOr<std::unique_ptr<LossScaler>> Create(Communicator* comm, LossScalerOptions options = {});

  double scale() const { return state_.scale; }
  absl::Status Update(bool found_nonfinite);

  const LossScalerState& state() const { return state_; }
  // On all ranks alike, not inside RunJoined(). InvalidArgument unless the scale is finite and positive.
  absl::Status LoadState(const LossScalerState& state);

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  bool can_leave() const override { return true; }

 private:
  LossScaler(Communicator* comm, const LossScalerOptions& options)
      : Joinable(comm, "loss_scaler"), options_(options), state_{.scale = options.initial_scale} {}

  absl::Status TakeOver(StateTransfer& transfer) override;

  const LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_LOSS_SCALER_H_
