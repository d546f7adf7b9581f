// The factor by which a loss is multiplied, so that small gradients do not vanish in half
// precision: halved when gradients overflow, doubled after many steps in which they did not.
//
//   EK_ASSIGN_OR_RETURN(auto scaler, LossScaler::Create(&comm));
//   for (...) {
//     ... backward of loss * scaler->scale() ...
//     EK_RETURN_IF_ERROR(optimizer->Step({.grad_scale = 1 / scaler->scale(),
//                                         .skip_nonfinite = true}));
//     EK_RETURN_IF_ERROR(scaler->Update(!optimizer->last_check()->is_finite));
//   }
//
// The ranks of a group agree on an optimizer's check: if a gradient is not finite on one rank, all
// skip the step. If ranks beyond that group share the scale (tensor parallel), or several
// optimizers do, agree first: CheckGradients(), then Communicator::AgreeAny() of the larger group,
// then Step({.skip = any}) and Update(any). Slices have no CheckGradients(), and need the loop
// above.
//
// Devices: last_check() waits for the step. check_before() belongs to the step before it, which the
//          device has usually finished, so that the host does not wait; the scale then changes one
//          step later, and two steps in a row may be skipped instead of one:
//            EK_RETURN_IF_ERROR(scaler->Update(optimizer->check_before().has_value() &&
//                                              !optimizer->check_before()->is_finite));
// Join:    put it into RunJoined()'s list, too: exhausted ranks adopt the scale.
// Order:   Update() once per step, on all ranks with inputs, with equal arguments.
// Threads: thread-compatible.
// Source:  torch.cuda.amp.GradScaler (its defaults); a least scale as in Megatron-LM.

#ifndef EVENKEEL_ZERO_OPTIM_LOSS_SCALER_H_
#define EVENKEEL_ZERO_OPTIM_LOSS_SCALER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
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
  int64_t growth_interval = 2000;  // Finite steps in a row before it grows.
  double least_scale = 1;          // The minimum.
  double largest_scale = 1 << 30;  // The maximum.
  friend bool operator==(const LossScalerOptions&, const LossScalerOptions&) = default;
};

// To save and load.
struct LossScalerState {
  double scale = 1;
  int64_t good_steps = 0;  // Finite steps since the last change.
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;

  static void VisitFields(auto& self, auto& visit) { visit(self.scale, self.good_steps); }
  std::string Serialize() const;
  // InvalidArgument for bytes that Serialize() of a valid state cannot have made.
  static absl::StatusOr<LossScalerState> Parse(absl::string_view bytes);
};

// Returns the state after a step. A pure function.
LossScalerState NextScale(const LossScalerOptions& options, LossScalerState state,
                          bool found_nonfinite);

class LossScaler : public Joinable {
 public:
  // A collective. InvalidArgument on all ranks if an option is out of range or the ranks differ.
  static absl::StatusOr<std::unique_ptr<LossScaler>> Create(Communicator* comm,
                                                            LossScalerOptions options = {});

  double scale() const { return state_.scale; }
  // `new_scale`: takes the place of the one that would follow. InvalidArgument unless it is finite
  // and positive.
  absl::Status Update(bool found_nonfinite, std::optional<double> new_scale = std::nullopt);

  const LossScalerState& state() const { return state_; }
  // Sets the state, equal on all ranks, not inside RunJoined(). InvalidArgument unless the scale is
  // finite and positive.
  absl::Status LoadState(const LossScalerState& state);

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }

 private:
  LossScaler(Communicator* comm, const LossScalerOptions& options)
      : Joinable(comm, "loss_scaler"), options_(options), state_{.scale = options.initial_scale} {}

  absl::Status TakeOver(StateTransfer& transfer) override;
  absl::StatusOr<Restore> KeepState(std::set<const void*>& kept) override;

  const LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_LOSS_SCALER_H_
