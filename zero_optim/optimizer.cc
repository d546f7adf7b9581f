#include "evenkeel/zero_optim/optimizer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/checkpoint.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/state_sync.h"

namespace evenkeel {

using internal::GradientSource;
using internal::LocalGradients;
using internal::ParameterUpdater;
using internal::StepMessage;

namespace {
constexpr int kStepList = 0;  // Of a device's tables.
}  // namespace

Optimizer::Optimizer(Communicator* comm, const ParameterSet* params, ParameterGroups groups)
    : Joinable(comm, "optimizer"), params_(params), updater_(params, std::move(groups), comm->runtime()) {}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(Communicator* comm, const ParameterSet* params,
                                                             const UpdateRule& rule) {
  return Create(comm, params, AllInOneGroup(*params, rule));
}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(Communicator* comm, const ParameterSet* params,
                                                             const std::vector<ParameterGroup>& groups) {
  auto made = ParameterGroups::Create(params->size(), groups);
  absl::Status own = made.status();
  std::unique_ptr<Optimizer> optimizer(
      new Optimizer(comm, params, own.ok() ? *std::move(made) : ParameterGroups(params->size())));
  own.Update(optimizer->updater_.Check());
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(*comm, optimizer->join_name(), own, *params, optimizer->groups()));
  return optimizer;
}

absl::Status Optimizer::AddGroup(ParameterGroup group) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "AddGroup");
  return internal::AddGroupOnAllRanks(communicator(), join_name(), *params_, std::move(group), updater_);
}

absl::Status Optimizer::Step(const StepOptions& options) {
  if (in_backward_ == InBackward::kAll) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(), ": Step() has nothing left to update: all parameters were updated in backward"));
  }
  const bool is_plain = !internal::NeedsCheck(options) && !options.skip && options.grad_scale == 1.0;
  if (in_backward_ == InBackward::kPart && !is_plain) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(),
                     ": clipping, scaling, skipping and looking for what is not finite are for all gradients, before "
                     "the first update; some parameters were updated in backward"));
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  EK_ASSIGN_OR_RETURN(const StepMessage step, PlanStep(options));
  if (!answer.everyone_active()) {
    EK_RETURN_IF_ERROR(communicator().steps().Announce(join_name(), step.Serialize()));
  }
  return Apply(step);
}

absl::StatusOr<GradientCheck> Optimizer::CheckGradients(double norm) {
  if (in_backward_ != InBackward::kNothing) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(), ": CheckGradients() would not see the gradients that were used up in backward"));
  }
  EK_ASSIGN_OR_RETURN(const StepMessage step, PlanStep({.clip = ClipOptions{.norm = norm}}));
  if (updater_.is_on_device()) {
    return updater_.MeasureNow(GradientsOf(step), norm, step.options.grad_scale, [] { return absl::OkStatus(); });
  }
  return Measure(step, norm);
}

GradientCheck Optimizer::Measure(const StepMessage& step, double norm) const {
  internal::GradientMeasure measure(params_->size(), norm);
  for (int i = 0; i < params_->size(); ++i) {
    if (step.sources[i] != GradientSource::kNone) measure.Add(i, internal::ElementsOf(*params_, i));
  }
  return measure.Result(step.options.grad_scale);
}

absl::StatusOr<StepMessage> Optimizer::PlanStep(const StepOptions& options) const {
  EK_RETURN_IF_ERROR(internal::CheckOptions(options));
  const bool is_complete =
      communicator().world_size() == 1 && join_config().divisor->by() != DivideBy::kSamples;  // Nothing to divide by.
  const LocalGradients local = is_complete ? LocalGradients::kComplete : LocalGradients::kRefused;
  StepMessage step{.rules = groups().rules(), .options = options};
  EK_ASSIGN_OR_RETURN(step.sources, ChooseSources(*params_, groups(), params_->mask(), local, communicator().rank()));
  return step;
}

absl::Status Optimizer::RepeatStep(absl::string_view payload) {
  EK_ASSIGN_OR_RETURN(const StepMessage step, StepMessage::Parse(payload, params_->size()));
  EK_RETURN_IF_ERROR(updater_.groups().Adopt(step.rules));
  EK_RETURN_IF_ERROR(CheckArrived(*params_, step.sources, communicator().rank()));
  return Apply(step);
}

absl::Status Optimizer::Apply(const StepMessage& step) {
  if (updater_.is_on_device()) return ApplyThere(step);
  StepOptions options = step.options;
  checks_.Begin();
  if (internal::NeedsCheck(options)) {
    GradientCheck check = Measure(step, internal::NormOf(options));
    options = internal::Decide(options, check);
    check.is_skipped = options.skip;
    checks_.Set(check);
  }
  for (int i = 0; i < params_->size() && !options.skip; ++i) {
    if (step.sources[i] == GradientSource::kNone) continue;
    updater_.Update(i, internal::ElementsOf(*params_, i), options.grad_scale);
  }
  CountStep(internal::SettingsText(groups(), step.rules, step.options));
  return absl::OkStatus();
}

std::vector<ParameterUpdater::Gradient> Optimizer::GradientsOf(const StepMessage& step) const {
  std::vector<ParameterUpdater::Gradient> gradients;
  for (int i = 0; i < params_->size(); ++i) {
    if (step.sources[i] != GradientSource::kNone) gradients.push_back({i, (*params_)[i].grad});
  }
  return gradients;
}

absl::Status Optimizer::ApplyThere(const StepMessage& step) {
  checks_.Begin();
  if (!step.options.skip) {
    const StreamRef stream = updater_.stream();
    EK_RETURN_IF_ERROR(updater_.SetGradients(kStepList, GradientsOf(step), stream));
    const bool is_measured = internal::NeedsCheck(step.options);
    if (is_measured) EK_RETURN_IF_ERROR(updater_.MeasureThere(kStepList, internal::NormOf(step.options), stream));
    EK_RETURN_IF_ERROR(updater_.UpdateThere(kStepList, step.options, is_measured, stream));
    if (is_measured) checks_.SetThere(&updater_.device());
  }
  CountStep(internal::SettingsText(groups(), step.rules, step.options));
  return absl::OkStatus();
}

absl::Status Optimizer::LoadState(const OptimizerState& state) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "LoadState");
  EK_RETURN_IF_ERROR(Annotate(updater_.CheckState(state), join_name()));
  return updater_.Import(state, [](int) { return true; });
}

absl::Status Optimizer::Save(const std::string& folder) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "Save");
  EK_ASSIGN_OR_RETURN(const StatePieces mine, Pieces());
  return WriteCheckpoint(folder, join_name(), communicator(), *params_, mine, steps_finished());
}

absl::StatusOr<StatePieces> Optimizer::Pieces() {
  if (is_torn_) return absl::FailedPreconditionError(absl::StrCat(join_name(), " is in the middle of an update"));
  if (communicator().rank() != 0) return StatePieces();  // All have the same.
  return updater_.Pieces();
}

absl::Status Optimizer::Load(const std::string& folder) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "Load");
  EK_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                      ReadCheckpoint(folder, join_name(), communicator(), *params_, [this](int param) {
                        return StateRange{0, (*params_)[param].value.count};
                      }));
  EK_RETURN_IF_ERROR(LoadState(loaded.state));
  SetStepsFinished(loaded.steps_finished);
  return absl::OkStatus();
}

absl::Status Optimizer::EnterGroup(const GroupChange& /*change*/) {
  return internal::CheckSameOnAllRanks(communicator(), join_name(), absl::OkStatus(), *params_, groups(),
                                       internal::SameIn::kShape);
}

absl::Status Optimizer::CheckWhole() const {
  if (!is_torn_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(join_name(), " was updating in backward when the step failed"));
}

absl::Status Optimizer::TakeOver(StateTransfer& transfer) {
  is_torn_ = false;
  EK_ASSIGN_OR_RETURN(Channel * channel, communicator().OpenChannel(join_name()));
  const internal::StateSync sync{.comm = communicator(), .channel = *channel, .name = join_name()};
  if (transfer.done.insert(params_).second) EK_RETURN_IF_ERROR(sync.BroadcastValues(*params_, transfer.source));
  return sync.BroadcastState(updater_, *params_, transfer.source);
}

absl::StatusOr<std::unique_ptr<JoinHook>> Optimizer::MakeJoinHook(const JoinOptions& /*options*/) {
  return std::make_unique<internal::ActionHook>(
      [this](const StepAnswer& /*step*/, absl::string_view payload) { return RepeatStep(payload); },
      [this](bool is_last_joiner) {
        return internal::AdoptFromLastJoiners(communicator(), join_name(), updater_.groups(), is_last_joiner);
      });
}

}  // namespace evenkeel
