// An optimizer with all of its state on every rank: SGD, Adam or AdamW.
//
//   EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(&comm, &params, AdamW{.learning_rate = 3e-4}));
//   for (...) {
//     ... gradients, reduced by a DataParallel ...
//     EK_RETURN_IF_ERROR(optimizer->Step());
//   }
//
// Step() updates every parameter that is trained and has a gradient; the others are left alone, decay and step count
// included. It communicates nothing as long as all ranks have inputs. In RunJoined() ranks that ran dry take the same
// step with the reduced gradients, so that weights, moments and step counts stay equal on all ranks.
//
// ReplaceGroup() and Recover() (join/recovery.h) go on in another group; the latter makes all ranks' state equal.
//
// sharded_optimizer.h splits the state over the ranks, with the same results.
//
// Devices:   parameters of float32 or bfloat16 on the group's device: Step() puts its work on their stream
//            (ParameterSet::SetStream()) and waits for nothing, whether it clips or skips or not. last_check() waits,
//            and so do state(), Save(), Load() and the like. State is float32; a bfloat16 parameter has a float32
//            master copy among it (StateTensorNames()). Weights are the CPU's bit for bit (device/device_update.h says
//            where not), and checkpoints the same files.
// Ownership: the communicator outlives its use, the parameters outlive it. Create it on all ranks in the same order.
// Threads:   thread-compatible.
// Errors:    InvalidArgument for settings or a state that do not fit, or ranks that differ (all ranks get that one).
//            FailedPrecondition from Step() if a gradient is this rank's own although there are others: the replicas
//            would diverge. Nothing was updated then.

#ifndef EVENKEEL_ZERO_OPTIM_OPTIMIZER_H_
#define EVENKEEL_ZERO_OPTIM_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/last_checks.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace internal {
class OptimizerInBackward;
}  // namespace internal

class Optimizer : public Joinable {
 public:
  // All ranks together; by one rule for all parameters, or by groups (parameter_groups.h).
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(Communicator* comm, const ParameterSet* params,
                                                           const UpdateRule& rule);
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(Communicator* comm, const ParameterSet* params,
                                                           const std::vector<ParameterGroup>& groups);

  absl::Status Step(const StepOptions& options = {});

  // What the gradients are, before Step(); says the same on all ranks and communicates nothing. Those of the last step,
  // if it was to clip or to skip what is not finite, tells last_check().
  absl::StatusOr<GradientCheck> CheckGradients(double norm = 2.0);
  const std::optional<GradientCheck>& last_check() const { return checks_.last(); }
  // The same of the step before the last: on a device that is there already, or almost, so that a loop that wants to
  // know what happened does not make the host wait for the step that it has just begun.
  const std::optional<GradientCheck>& check_before() const { return checks_.before(); }

  const ParameterGroups& groups() const { return updater_.groups(); }
  // Of all groups or of one, on all ranks alike; a dry rank gets it with the next step, or at the end of the loop.
  absl::Status SetLearningRate(double learning_rate) { return updater_.groups().SetLearningRate(learning_rate); }
  absl::Status SetLearningRate(absl::string_view group, double learning_rate) {
    return updater_.groups().SetLearningRate(group, learning_rate);
  }
  // One more, of parameters that were in none. All ranks together, between steps, not inside RunJoined().
  absl::Status AddGroup(ParameterGroup group);

  // Empty if a device has failed, which the next Step() says.
  OptimizerState state() { return updater_.Export().value_or(OptimizerState()); }
  int64_t state_bytes() const { return updater_.state_bytes(); }
  // Replaces all state. On all ranks alike, not inside RunJoined().
  absl::Status LoadState(const OptimizerState& state);

  // A checkpoint in a folder that all ranks see (checkpoint.h), which sharded optimizers can load as well, and at any
  // world size. All ranks together, between steps, not inside RunJoined().
  absl::Status Save(const std::string& folder);
  absl::Status Load(const std::string& folder);
  // What this rank writes of it, for WriteCheckpoint() in a hook that dry ranks run, too.
  absl::StatusOr<StatePieces> Pieces();

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override;
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  bool counts_steps() const override { return true; }
  bool can_leave() const override { return true; }

 private:
  friend class internal::OptimizerInBackward;  // optimizer_in_backward.h
  enum class InBackward { kNothing, kPart, kAll };

  Optimizer(Communicator* comm, const ParameterSet* params, ParameterGroups groups);

  absl::StatusOr<internal::StepMessage> PlanStep(const StepOptions& options) const;
  absl::Status RepeatStep(absl::string_view payload);
  absl::Status Apply(const internal::StepMessage& step);
  absl::Status ApplyThere(const internal::StepMessage& step);  // On a device.
  GradientCheck Measure(const internal::StepMessage& step, double norm) const;
  std::vector<internal::ParameterUpdater::Gradient> GradientsOf(const internal::StepMessage& step) const;

  absl::Status EnterGroup(const GroupChange& change) override;
  absl::Status CheckWhole() const override;
  absl::Status TakeOver(StateTransfer& transfer) override;

  const ParameterSet* const params_;
  internal::ParameterUpdater updater_;
  internal::LastChecks checks_;                    // Behind the updater, whose device it asks.
  InBackward in_backward_ = InBackward::kNothing;  // What is updated there.
  bool is_torn_ = false;                           // A step that updates in backward has begun to, and has not ended.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_OPTIMIZER_H_
