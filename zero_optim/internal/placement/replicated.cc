#include "evenkeel/zero_optim/internal/placement/replicated.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/bucket/replica_check.h"
#include "evenkeel/bucket/replica_transfer.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/open_works.h"

namespace evenkeel::internal {

std::vector<Fact> ReplicatedOptimizer::OtherSettings() const {
  return {{"update_in_backward", updates_in_backward() ? "true" : "false"},
          {"check_replicas", ToString(options().check_replicas)}};
}

absl::Status ReplicatedOptimizer::Step(const StepOptions& options) {
  const PhaseScope phase(communicator(), StepPhase::kOptimizer);
  if (updates_in_backward() && in_backward_ == InBackward::kNothing) {
    return Refusal(": it updates in backward, and no reducer has its reduction");
  }
  if (in_backward_ == InBackward::kAll) {
    return Refusal(": Step() has nothing left to update: all parameters were updated in backward");
  }
  const bool is_plain = !NeedsCheck(options) && !options.skip && options.grad_scale == 1.0;
  if (in_backward_ == InBackward::kPart && !is_plain) {
    return Refusal(
        ": clipping, scaling, skipping and checks for non-finite values need all gradients before "
        "the first update, but some parameters were updated in backward");
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  EK_ASSIGN_OR_RETURN(StepMessage step, PlanStep(options));
  if (!answer.everyone_active()) {
    step.hashes = HashTensors(step.sources);
    EK_RETURN_IF_ERROR(Announce(step));
  }
  return Apply(step);
}

absl::StatusOr<GradientCheck> ReplicatedOptimizer::CheckGradients(double norm) {
  if (in_backward_ != InBackward::kNothing) {
    return Refusal(": CheckGradients() would not see the gradients that were used up in backward");
  }
  EK_ASSIGN_OR_RETURN(const StepMessage step, PlanStep({.clip = ClipOptions{.norm = norm}}));
  if (updater_.is_on_device()) {
    return updater_.MeasureNow(GradientsOf(step), norm, step.options.grad_scale,
                               [] { return absl::OkStatus(); });
  }
  return Measure(step, norm);
}

GradientCheck ReplicatedOptimizer::Measure(const StepMessage& step, double norm) const {
  GradientMeasure measure(params_->size(), norm);
  for (int i = 0; i < params_->size(); ++i) {
    if (step.sources[i] != GradientSource::kNone) measure.Add(i, ElementsOf(*params_, i));
  }
  return measure.Result(step.options.grad_scale);
}

absl::StatusOr<StepMessage> ReplicatedOptimizer::PlanStep(const StepOptions& options) const {
  EK_RETURN_IF_ERROR(CheckOptions(options));
  StepMessage step{.rules = groups().rules(), .options = options};
  EK_ASSIGN_OR_RETURN(step.sources, Choose(params_->mask(), LocalGradients::kRefused));
  return step;
}

absl::Status ReplicatedOptimizer::RepeatStep(const StepAnswer& /*answer*/,
                                             const StepMessage& step) {
  EK_RETURN_IF_ERROR(updater_.groups().Adopt(step.rules));
  EK_RETURN_IF_ERROR(CheckArrived(*params_, step.sources, communicator().rank()));
  EK_RETURN_IF_ERROR(CheckUnchanged(step));
  return Apply(step);
}

absl::Status ReplicatedOptimizer::Apply(const StepMessage& step) {
  EK_RETURN_IF_ERROR(CheckFirstValues());
  EK_RETURN_IF_ERROR(RunBeforeUpdate(WholePieces(step.sources)));
  checks_.Begin();
  if (updater_.is_on_device()) return ApplyThere(step);
  StepOptions options = step.options;
  if (NeedsCheck(options)) options = checks_.Decide(options, Measure(step, NormOf(options)));
  for (int i = 0; i < params_->size() && !options.skip; ++i) {
    if (step.sources[i] == GradientSource::kNone) continue;
    updater_.Update(i, ElementsOf(*params_, i), options.grad_scale);
  }
  return EndStep(step);
}

absl::Status ReplicatedOptimizer::EndStep(const StepMessage& step) {
  is_torn_ = false;
  EK_RETURN_IF_ERROR(EndUpdate(step));
  if (!IsCheckDue(options().check_replicas, communicator(), steps_finished()))
    return absl::OkStatus();
  const absl::StatusOr<std::vector<NamedView>> state = updater_.NamedState();
  if (!state.ok()) {  // Its device fails; the others must not wait for it.
    communicator().Abort(state.status());
    return state.status();
  }
  return CompareReplicas(join_name(), *state, communicator(), options().check_replicas,
                         steps_finished(), updater_.stream());
}

std::vector<ParameterUpdater::Gradient> ReplicatedOptimizer::GradientsOf(
    const StepMessage& step) const {
  std::vector<ParameterUpdater::Gradient> gradients;
  for (int i = 0; i < params_->size(); ++i) {
    if (step.sources[i] != GradientSource::kNone) gradients.push_back({i, (*params_)[i].grad});
  }
  return gradients;
}

absl::Status ReplicatedOptimizer::ApplyThere(const StepMessage& step) {
  if (!step.options.skip) {
    const StreamRef stream = updater_.stream();
    EK_RETURN_IF_ERROR(updater_.SetGradients(kStepList, GradientsOf(step), stream));
    EK_RETURN_IF_ERROR(MeasureStepThere(step.options));
    EK_RETURN_IF_ERROR(PrepareStepThere(step.options));
    EK_RETURN_IF_ERROR(updater_.ApplyThere(kStepList, stream));
  }
  return EndStep(step);
}

absl::Status ReplicatedOptimizer::TakeState(const OptimizerState& state,
                                            const std::map<int, int64_t>& /*steps*/,
                                            const Ranges& ranges, OptimizerState* movable) {
  is_torn_ = false;
  return updater_.Import(state, ranges, movable, [](int) { return true; });
}

absl::StatusOr<StatePieces> ReplicatedOptimizer::Pieces() {
  if (is_torn_) return Refusal(" is in the middle of an update");
  if (communicator().rank() != 0) return StatePieces();  // All have the same.
  return updater_.Pieces();
}

absl::Status ReplicatedOptimizer::OnEnter(const GroupChange& /*change*/) {
  // A new process may have other settings, and would compare replicas at other steps.
  return CheckSame(absl::OkStatus(), OtherSettings());
}

HeldState ReplicatedOptimizer::CheckState() const {
  if (!is_torn_) return {};
  return {StateKind::kTorn,
          absl::StrCat(join_name(),
                       " had updated some parameters in backward when the step failed, and would "
                       "update them twice: load a checkpoint")};
}

absl::Status ReplicatedOptimizer::TakeOverState(Channel& channel, StateTransfer& transfer) {
  is_torn_ = false;
  EK_RETURN_IF_ERROR(AdoptSettingsOf(transfer.source));
  return TransferReplicas(communicator(), transfer,
                          {.tensors = [this] { return updater_.NamedState(); },
                           .move = [&](int source) { return SendState(channel, source); },
                           .stream = updater_.stream()});
}

absl::Status ReplicatedOptimizer::SendState(Channel& channel, int source) {
  EK_RETURN_IF_ERROR(updater_.Refresh());
  ByteWriter mine;
  for (int i = 0; i < params_->size() && communicator().rank() == source; ++i)
    mine.I64(updater_.step(i));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("steps_of", mine.Take()));
  ByteReader reader(parts[source]);
  std::vector<Work> works;
  for (int i = 0; i < params_->size(); ++i) {
    const int64_t step = reader.I64();
    if (!reader.ok()) return reader.Finish("an optimizer's step counts");
    EK_RETURN_IF_ERROR(updater_.Prepare(i, step));
    for (HeldTensor& tensor : updater_.tensors(i)) {
      works.push_back(channel.Broadcast(tensor.view(), source,
                                        {.role = Role::kState, .after = updater_.stream()}));
    }
  }
  return internal::WaitForAll(works);
}

}  // namespace evenkeel::internal
