// A step, on every rank:
//
//   reduce this rank's own gradients towards their owners     (only those that are not reduced yet)
//   for each bucket of the schedule: its owner updates it, then all issue its broadcast
//   wait for the broadcasts
//
// On a device each of these is work on the parameters' stream, or is ordered behind and before it;
// whether the step is skipped is decided there, so buckets go round after one that has changed
// nothing, too.
//
// A rank issues the broadcasts of owners before it, then updates its own buckets while those
// arrive. Before it begins, the lowest active rank sends exhausted ranks a description of the step
// (StepMessage), and they run the same code.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "evenkeel/bucket/finite_check.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/internal/device_agreement.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/open_works.h"
#include "evenkeel/zero_optim/internal/placement/whole_tensors.h"

namespace evenkeel::internal {

absl::Status WholeTensorsOptimizer::Step(const StepOptions& options) {
  const PhaseScope phase(communicator(), StepPhase::kOptimizer);
  EK_RETURN_IF_ERROR(CheckOptions(options));
  EK_RETURN_IF_ERROR(ChooseGradients());
  NoteStep(gradients_->ticket);
  if (!gradients_->answer.everyone_active()) {
    gradients_->hashes = HashTensors(gradients_->sources);
    EK_RETURN_IF_ERROR(Announce(StepWith(options)));
  }
  return Run(options);
}

absl::StatusOr<GradientCheck> WholeTensorsOptimizer::CheckGradients(double norm) {
  const StepOptions options = {.clip = ClipOptions{.norm = norm}};
  EK_RETURN_IF_ERROR(CheckOptions(options));
  EK_RETURN_IF_ERROR(ChooseGradients());
  if (!gradients_->answer.everyone_active())
    EK_RETURN_IF_ERROR(Announce(CheckAction{StepWith(options)}));
  EK_RETURN_IF_ERROR(ReduceGradients());
  return Measure(norm, /*grad_scale=*/1.0);
}

StepMessage WholeTensorsOptimizer::StepWith(const StepOptions& options) const {
  return {.rules = groups().rules(),
          .options = options,
          .sources = gradients_->sources,
          .hashes = gradients_->hashes};
}

// Nothing if CheckGradients() has chosen them in this step.
absl::Status WholeTensorsOptimizer::ChooseGradients() {
  if (gradients_.has_value() && gradients_->ticket == StepControl::Of(communicator()).current())
    return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  EK_ASSIGN_OR_RETURN(StepAnswer answer, ticket->Wait());
  EK_ASSIGN_OR_RETURN(std::vector<GradientSource> sources,
                      Choose(plan()->mask, LocalGradients::kReduced));
  EK_RETURN_IF_ERROR(TakeGradients(std::move(answer), std::move(sources)));
  gradients_->ticket = std::move(ticket);
  return absl::OkStatus();
}

absl::Status WholeTensorsOptimizer::TakeGradients(StepAnswer answer,
                                                  std::vector<GradientSource> sources) {
  // Those of a check without a step may still be on their way.
  if (gradients_.has_value() && gradients_->is_reduced) EK_RETURN_IF_ERROR(reduction_->WaitAll());
  gradients_ = Gradients{.answer = std::move(answer), .sources = std::move(sources)};
  gradients_->scale = join_config().divisor.ScaleOf(gradients_->answer, join_name());
  left_samples_ = 0;  // After a skipped step, too: the gradients are used up.
  for (int i = 0; i < params_->size(); ++i) {
    if (gradients_->sources[i] == GradientSource::kToReduce) gradients_->to_reduce.push_back(i);
  }
  if (!gradients_->to_reduce.empty()) EK_RETURN_IF_ERROR(CheckSamples());
  return absl::OkStatus();
}

// Tests the gradients that no DataParallel has reduced.
absl::Status WholeTensorsOptimizer::CheckOwnGradients() {
  if (!checks_finite_ || communicator().runtime() != nullptr) return absl::OkStatus();
  for (int i = 0; i < params_->size(); ++i) {
    if (gradients_->sources[i] == GradientSource::kNone) continue;
    if (params_->grad_state(i) != GradState::kLocal) continue;
    EK_RETURN_IF_ERROR(internal::CheckFinite(communicator(), *params_, i));
  }
  return absl::OkStatus();
}

// Until those of this rank's parameters are there; all of them if it owns none.
absl::Status WholeTensorsOptimizer::ReduceGradients() {
  if (gradients_->is_reduced) return absl::OkStatus();
  // Not before the step was announced: ranks without inputs send and receive state, too.
  EK_RETURN_IF_ERROR(CheckFirstValues());
  if (plan()->better.has_value()) EK_RETURN_IF_ERROR(MoveTo(*plan()->better));
  const PlanPtr plan = this->plan();
  EK_RETURN_IF_ERROR(CheckOwnGradients());
  EK_RETURN_IF_ERROR(
      reduction_->Start(plan->owners, gradients_->to_reduce,
                        {.scale = gradients_->scale, .has_inputs = gradients_->ticket != nullptr}));
  gradients_->is_reduced = true;
  absl::Status status;
  bool owns_any = false;
  for (int param : gradients_->to_reduce) {
    if (plan->owners.owner(param) != communicator().rank()) continue;
    owns_any = true;
    status.Update(reduction_->Wait(param).status());
  }
  if (!owns_any) status.Update(reduction_->WaitAll());
  return status;
}

// Returns the gradient of a parameter that this rank owns; without data if there is none.
absl::StatusOr<TensorView> WholeTensorsOptimizer::GradientOf(int param) {
  switch (gradients_->sources[param]) {
    case GradientSource::kNone:
      return TensorView();
    case GradientSource::kHere:
      return (*params_)[param].grad;
    case GradientSource::kToReduce:
      return reduction_->Wait(param);
  }
  return absl::InternalError("a gradient without a source");
}

absl::StatusOr<std::vector<ParameterUpdater::Gradient>> WholeTensorsOptimizer::OwnGradients(
    const std::vector<int>& params) {
  const PlanPtr plan = this->plan();
  std::vector<ParameterUpdater::Gradient> gradients;
  for (int param : params) {
    const GradientSource source = gradients_->sources[param];
    if (source == GradientSource::kNone || plan->owners.owner(param) != communicator().rank())
      continue;
    EK_ASSIGN_OR_RETURN(const TensorView elements, GradientOf(param));
    const bool is_reduced_here = source == GradientSource::kToReduce;
    if (is_reduced_here && elements.data == nullptr) continue;
    gradients.push_back(
        {.param = param, .elements = elements, .flag = is_reduced_here ? param : -1});
  }
  return gradients;
}

// Each rank measures what it owns, ranks without inputs too; the sum is over this optimizer's own
// group.
absl::StatusOr<GradientCheck> WholeTensorsOptimizer::Measure(double norm, double grad_scale) {
  EK_ASSIGN_OR_RETURN(const std::vector<ParameterUpdater::Gradient> gradients,
                      OwnGradients(all_params_));
  if (updater_.is_on_device()) {
    return updater_.MeasureNow(gradients, norm, grad_scale, [&] {
      return AddUpMeasure(updater_, norm, communicator(), *channel());
    });
  }
  GradientMeasure measure(params_->size(), norm);
  for (const ParameterUpdater::Gradient& gradient : gradients)
    measure.Add(gradient.param, gradient.elements);
  return Total(std::move(measure), norm, grad_scale);
}

absl::Status WholeTensorsOptimizer::AdoptStep(const StepAnswer& answer, const StepMessage& step) {
  EK_RETURN_IF_ERROR(updater_.groups().Adopt(step.rules));
  const bool is_known =
      gradients_.has_value() && gradients_->answer.step == answer.step;  // From a check before.
  if (!is_known) {
    EK_RETURN_IF_ERROR(TakeGradients(answer, step.sources));
    EK_RETURN_IF_ERROR(CheckArrived(*params_, step.sources, communicator().rank()));
  }
  return absl::OkStatus();
}

absl::Status WholeTensorsOptimizer::RepeatStep(const StepAnswer& answer, const StepMessage& step) {
  EK_RETURN_IF_ERROR(AdoptStep(answer, step));
  EK_RETURN_IF_ERROR(CheckUnchanged(step));
  gradients_->hashes = step.hashes;
  return Run(step.options);
}

absl::Status WholeTensorsOptimizer::RepeatCheck(const StepAnswer& answer, const StepMessage& step) {
  EK_RETURN_IF_ERROR(AdoptStep(answer, step));
  EK_RETURN_IF_ERROR(ReduceGradients());
  return Measure(step.options.clip.value_or(ClipOptions()).norm, /*grad_scale=*/1.0).status();
}

absl::Status WholeTensorsOptimizer::Run(const StepOptions& options) {
  StepOptions decided = options;
  checks_.Begin();
  open_.Forget();
  // No rank's parameters or state change before all ranks have come here: until then a failed step
  // can be repeated (on a device it cannot). The broadcasts would queue behind the
  // reductions anyway.
  if (!options.skip) EK_RETURN_IF_ERROR(ReduceGradients());
  EK_RETURN_IF_ERROR(RunBefore(options));
  if (!options.skip && updater_.is_on_device()) EK_RETURN_IF_ERROR(DecideThere(options));
  if (NeedsCheck(options) && !updater_.is_on_device()) {
    EK_ASSIGN_OR_RETURN(const GradientCheck check, Measure(NormOf(options), options.grad_scale));
    decided = checks_.Decide(options, check);
  }
  if (!decided.skip) EK_RETURN_IF_ERROR(UpdateAndSend(decided.grad_scale));
  if (gradients_->is_reduced) EK_RETURN_IF_ERROR(reduction_->WaitAll());
  for (int param : gradients_->to_reduce) {
    params_->SetGradState(param, GradState::kReduced);  // Used, not dropped: their samples count.
    params_->SetGradState(param, GradState::kNone);
  }
  for (size_t i = 0; i < was_updated_.size() && !decided.skip; ++i) {
    if (gradients_->sources[i] != GradientSource::kNone) was_updated_[i] = 1;
  }
  Gradients used = *std::exchange(gradients_, std::nullopt);
  return EndUpdate({.rules = groups().rules(),
                    .options = options,
                    .sources = std::move(used.sources),
                    .hashes = std::move(used.hashes)});
}

// On a rank without inputs those that have arrived are all, too.
absl::Status WholeTensorsOptimizer::RunBefore(const StepOptions& options) {
  std::vector<GradientPiece> pieces = WholePieces(gradients_->sources);
  for (const int param : gradients_->to_reduce) {
    const bool is_owner = plan()->owners.owner(param) == communicator().rank();
    if (options.skip || !is_owner || !has_functions_before()) continue;
    EK_ASSIGN_OR_RETURN(const TensorView gradient, GradientOf(param));
    if (gradient.data != nullptr) pieces.push_back({.param = param, .gradient = gradient});
  }
  return RunBeforeUpdate(pieces);
}

// Counts the steps, too.
absl::Status WholeTensorsOptimizer::DecideThere(const StepOptions& options) {
  const StreamRef stream = updater_.stream();
  EK_ASSIGN_OR_RETURN(const std::vector<ParameterUpdater::Gradient> gradients,
                      OwnGradients(all_params_));
  EK_RETURN_IF_ERROR(updater_.SetGradients(kStepList, gradients, stream));
  TensorView flags;
  bool may_be_unset = false;
  if (!gradients_->to_reduce.empty()) {
    std::vector<float> own(params_->size(), 0);
    for (int param : gradients_->to_reduce) {
      own[param] = reduction_->HasOwnGradient(param) ? 1 : 0;
      may_be_unset = may_be_unset || own[param] == 0;
    }
    EK_RETURN_IF_ERROR(device_flags_.Reduce(own, updater_, communicator(), *channel(), stream));
    flags = device_flags_.all();
  }
  EK_RETURN_IF_ERROR(MeasureStepThere(options));
  is_torn_ = true;
  return PrepareStepThere(options, flags, may_be_unset);
}

absl::Status WholeTensorsOptimizer::UpdateAndSend(double grad_scale) {
  const PlanPtr plan = this->plan();
  const StreamRef stream = params_->stream();
  absl::Status status;
  std::vector<Work> broadcasts;
  is_torn_ = true;
  for (size_t b = 0; b < plan->buckets.size() && status.ok(); ++b) {
    const ShardBucket& bucket = plan->buckets[b];
    if (bucket.owner == communicator().rank())
      status = UpdateBucket(static_cast<int>(b), bucket, grad_scale);
    if (!status.ok() || communicator().world_size() == 1) continue;
    TensorList values;
    for (int param : bucket.params) values.push_back((*params_)[param].value);
    broadcasts.push_back(
        channel()->Issue(plan->schedule.entries[b], values, values, {.after = stream}));
  }
  status.Update(OrderAllBefore(broadcasts, stream));
  status.Update(reduction_->WaitAll());
  if (updater_.is_on_device()) {
    open_.Add(std::move(broadcasts));
    open_.Add(reduction_->works());
  }
  if (status.ok()) is_torn_ = false;
  return status;
}

absl::Status WholeTensorsOptimizer::UpdateBucket(int index, const ShardBucket& bucket,
                                                 double grad_scale) {
  EK_ASSIGN_OR_RETURN(const std::vector<ParameterUpdater::Gradient> gradients,
                      OwnGradients(bucket.params));
  if (updater_.is_on_device()) {
    const int list = kFirstBucketList + index;
    EK_RETURN_IF_ERROR(updater_.SetGradients(list, gradients, updater_.stream()));
    return updater_.ApplyThere(list, updater_.stream());
  }
  for (const ParameterUpdater::Gradient& gradient : gradients) {
    updater_.Update(gradient.param, gradient.elements, grad_scale);
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
