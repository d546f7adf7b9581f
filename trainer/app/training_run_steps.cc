// The work of an epoch: its steps, the passes of a step, and their reports.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/learning_rate.h"
#include "evenkeel/trainer/app/step_watch.h"
#include "evenkeel/trainer/app/sum_over_ranks.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/data/augment.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/sampler.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel {
namespace {

// Returns a value that is equal for equal arguments only.
uint64_t NoiseOf(uint64_t seed, int64_t step, int rank, int64_t pass) {
  return StableRandom(StableRandom(seed, step).Next(), rank).Next() + static_cast<uint64_t>(pass);
}

double NormOf(const TrainOptions& options, const std::optional<GradientCheck>& check) {
  // A check without clipping has another norm.
  return options.clip > 0 && check.has_value() ? check->norm : kUnknown;
}

}  // namespace

absl::Status TrainingRun::FollowScale() {
  if (scaler_ == nullptr) return absl::OkStatus();
  const std::optional<GradientCheck> check = optimizer_->check_before();
  const bool before = std::exchange(last_overflowed_, false);
  return scaler_->Update(check.has_value() ? !check->is_finite : before);
}

absl::Status TrainingRun::Loop(absl::FunctionRef<absl::Status()> loop) {
  if (!options_.flags.join) return loop();
  const JoinOptions options{.throw_on_early_termination = options_.flags.stop_early,
                            .divide_by = options_.divide_by};
  return RunJoined(Joinables(), options, [&](JoinScope& scope) {
    setup_.model->SetScope(&scope);
    const absl::Status status = loop();
    setup_.model->SetScope(nullptr);
    return status;
  });
}

absl::Status TrainingRun::Freeze(int64_t step) {
  ParameterSet& parameters = setup_.model->parameters();
  const uint64_t version = parameters.mask_version();
  ApplyFreezeSchedule(options_.freeze, step, parameters);
  // A check in every n-th step only, or never, would miss it.
  if (parameters.mask_version() == version ||
      options_.trainability == TrainabilityPolicy::kAlways) {
    return absl::OkStatus();
  }
  return ddp_->RefreshTrainable();
}

absl::Status TrainingRun::CheckLoss(int64_t step, double loss) {
  if (std::isfinite(loss)) return absl::OkStatus();
  return Own(
      absl::OutOfRangeError(absl::StrCat("the loss is ", loss, " in step ", step + 1,
                                         "; try a lower --lr, a longer --warmup or --clip")));
}

absl::StatusOr<BatchResult> TrainingRun::Note(int64_t step, int epoch, const StepResult& result) {
  BatchResult whole;
  for (const auto& [pending, share] : result.parts) {
    const absl::StatusOr<BatchResult> pass = pending.Wait(SteadyNow() + comm_->timeout());
    EK_RETURN_IF_ERROR(Own(pass.status()));
    EK_RETURN_IF_ERROR(CheckLoss(step, pass->loss_mean));
    whole.predictions += pass->predictions;
    whole.correct += pass->correct;
    whole.loss_mean += pass->loss_mean * share;
  }
  last_ = {.step = step,
           .epoch = epoch,
           .batch = {.predictions = whole.predictions,
                     .correct = whole.correct,
                     .loss_sum = whole.loss_mean * static_cast<double>(whole.predictions)}};
  trained_[epoch] += last_.batch;
  return whole;
}

absl::Status TrainingRun::Mark(SpanKind kind) {
  recorder_.Mark(kind);
  return clock_ == nullptr ? absl::OkStatus() : Own(clock_->Mark(kind));
}

absl::Status TrainingRun::Report(UnreportedStep step, OnStep on_step) {
  const absl::StatusOr<StreamStep> device = clock_->Read(step.marks);
  EK_RETURN_IF_ERROR(Own(device.status()));
  recorder_.NoteDevice(step.facts.step, *device);
  step.facts.took = device->took;
  step.facts.sync = device->exposed;
  step.facts.clock = StepClock::kDevice;
  return Own(on_step(step.facts));
}

absl::Status TrainingRun::ReportPassed(OnStep on_step) {
  absl::Status status;
  for (UnreportedStep& step : unreported_) {
    if (step.is_noted) continue;
    absl::StatusOr<BatchResult> own = Note(step.facts.step, step.facts.epoch, step.result);
    status = own.status();
    if (!status.ok()) break;  // The steps before it have passed, and are reported all the same.
    step.facts.own = *std::move(own);
    step.is_noted = true;
  }
  while (!unreported_.empty() && unreported_.front().is_noted) {
    const absl::StatusOr<bool> has_passed = clock_->HasPassed(unreported_.front().marks);
    EK_RETURN_IF_ERROR(Own(has_passed.status()));
    if (!*has_passed) break;
    UnreportedStep step = std::move(unreported_.front());
    unreported_.pop_front();
    EK_RETURN_IF_ERROR(Report(std::move(step), on_step));
  }
  return status;
}

absl::Status TrainingRun::ReportAll(OnStep on_step) {
  if (unreported_.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(Own(clock_->Wait(unreported_.back().marks, SteadyNow() + comm_->timeout())));
  unreported_.back().facts.gradient_norm = NormOf(options_, optimizer_->last_check());
  return ReportPassed(on_step);
}

Batch TrainingRun::LoadBatch(std::span<const int32_t> samples) {
  const PhaseScope input(*comm_, StepPhase::kInput);
  const Batch batch = setup_.data->train->Gather(samples, memory_);
  if (setup_.data->image.has_value() &&
      (options_.augment.mirrors || options_.augment.max_shift > 0)) {
    Augment(options_.augment, *setup_.data->image, epoch_, samples, memory_.images);
  }
  return batch;
}

absl::StatusOr<PendingResult> TrainingRun::Pass(int64_t step, std::span<const int32_t> samples,
                                                const PassOptions& how,
                                                absl::FunctionRef<absl::Status(int)> on_gradient) {
  const Batch batch = LoadBatch(samples);
  EK_RETURN_IF_ERROR(Mark(SpanKind::kData));
  absl::StatusOr<PendingResult> result = setup_.model->StartForward(batch, Mode::kTraining, how);
  const absl::Status marked = Mark(SpanKind::kForward);
  if (absl::IsResourceExhausted(result.status())) {
    return Own(absl::ResourceExhaustedError(absl::StrCat(
        result.status().message(), "; use a smaller --batch_size with a larger --accumulate")));
  }
  if (absl::IsInvalidArgument(result.status()))
    return Own(setup_.data->train->Explain(result.status(), samples));
  EK_RETURN_IF_ERROR(Own(result.status()));
  EK_RETURN_IF_ERROR(marked);
  if (result->is_there())
    EK_RETURN_IF_ERROR(CheckLoss(step, result->Wait(absl::InfinitePast())->loss_mean));
  absl::Status announced;
  const absl::Status backward = setup_.model->Backward([&](int index) {
    announced.Update(on_gradient(index));
    return announced;
  });
  EK_RETURN_IF_ERROR(announced);
  EK_RETURN_IF_ERROR(Own(backward));
  EK_RETURN_IF_ERROR(Mark(SpanKind::kBackward));
  return result;
}

absl::StatusOr<TrainingRun::StepResult> TrainingRun::Passes(int64_t step,
                                                            std::span<const int32_t> samples) {
  const double all = static_cast<double>(samples.size());
  const bool wants_sums = options_.flags.join && options_.divide_by == DivideBy::kSamples;
  const double scale = scaler_ == nullptr ? 1.0 : scaler_->scale();
  StepResult result;
  for (size_t first = 0; first < samples.size(); first += options_.batch_size) {
    const auto part =
        samples.subspan(first, std::min<size_t>(options_.batch_size, samples.size() - first));
    const bool is_last = first + part.size() == samples.size();
    const double share = static_cast<double>(part.size()) / all;
    EK_ASSIGN_OR_RETURN(
        PendingResult pass,
        Pass(step, part,
             {.weight = scale * (wants_sums ? static_cast<double>(part.size()) : share),
              .noise =
                  NoiseOf(options_.flags.seed, step, comm_->rank(), static_cast<int64_t>(first))},
             [&](int index) -> absl::Status {
               return is_last ? ddp_->GradientReady(index) : absl::OkStatus();
             }));
    result.parts.push_back({std::move(pass), share});
  }
  return result;
}

absl::StatusOr<TrainingRun::StepResult> TrainingRun::Step(int64_t step,
                                                          std::span<const int32_t> samples) {
  recorder_.Begin(step);
  if (clock_ != nullptr) {
    clock_->Begin(recorder_.IsSampled(step) ? StreamClock::Detail::kParts
                                            : StreamClock::Detail::kSummary);
  }
  EK_RETURN_IF_ERROR(Freeze(step));
  const double learning_rate = LearningRate(learning_rates(), step);
  EK_RETURN_IF_ERROR(Own(optimizer_->SetLearningRate(learning_rate)));

  setup_.model->parameters().ClearGradients();
  StepControl::Of(*comm_).AddSamples(static_cast<int64_t>(samples.size()));
  EK_RETURN_IF_ERROR(ddp_->BeginStep());
  recorder_.NotePlan(step, ddp_->reducer().generation(), ddp_->buckets(),
                     setup_.model->parameters());
  EK_RETURN_IF_ERROR(Mark(SpanKind::kBegin));
  absl::StatusOr<StepResult> result = Passes(step, samples);
  EK_RETURN_IF_ERROR(result.status());
  EK_RETURN_IF_ERROR(ddp_->FinishStep());
  EK_RETURN_IF_ERROR(Mark(SpanKind::kWait));
  EK_RETURN_IF_ERROR(watch_->TakePart());
  StepOptions how;
  if (options_.clip > 0) how.clip = ClipOptions{.max_norm = options_.clip};
  if (scaler_ != nullptr) {
    how.grad_scale = 1 / scaler_->scale();
    how.skip_nonfinite = true;
  }
  EK_RETURN_IF_ERROR(optimizer_->Step(how));
  EK_RETURN_IF_ERROR(FollowScale());
  EK_RETURN_IF_ERROR(Mark(SpanKind::kOptimizer));
  recorder_.End(ddp_->reducer().last_step(), ddp_->buckets());
  return result;
}

absl::StatusOr<EpochResult> TrainingRun::TrainEpoch(
    int epoch, absl::FunctionRef<absl::Status(const StepFacts&)> on_step, const Pauses& pauses) {
  const int rank = comm_->rank();
  const BatchPlan batches{.samples = setup_.data->train->size(),
                          .first = epoch == plan().begin.epoch ? plan().begin.samples : 0,
                          .batch_size = options_.samples_per_step(),
                          .rank = rank,
                          .world_size = comm_->world_size()};
  const std::vector<int32_t> order =
      options_.flags.shuffle ? ShuffledOrder(batches.samples, options_.flags.seed, epoch)
                             : InOrder(batches.samples);

  epoch_ = epoch;
  const Evaluation& mine = trained_[epoch];
  // An earlier run has done the steps before it.
  const int64_t before = std::max<int64_t>(0, first_step_ - plan().FirstStep(epoch));
  StepFacts facts{.epoch = epoch, .step = plan().FirstStep(epoch) + before};
  absl::Time begin = SteadyNow();
  EpochResult result;
  const auto finish_step = [&](const StepAnswer& answer, StepResult pending) -> absl::Status {
    const absl::Time end = SteadyNow();
    facts.took = end - std::exchange(begin, end);
    facts.active = answer.active;
    facts.samples = answer.samples;
    facts.learning_rate = LearningRate(learning_rates(), facts.step);
    absl::Status status;
    facts.gradient_norm = kUnknown;
    if (clock_ != nullptr && facts.own_samples > 0) {
      // The host need not wait for the norm of the step before.
      if (!unreported_.empty())
        unreported_.back().facts.gradient_norm = NormOf(options_, optimizer_->check_before());
      status = ReportPassed(on_step);
      unreported_.push_back({.facts = facts, .result = std::move(pending), .marks = clock_->End()});
    } else {
      if (facts.own_samples > 0) facts.gradient_norm = NormOf(options_, optimizer_->last_check());
      status = ReportAll(on_step);
      if (status.ok()) status = Own(on_step(facts));
    }
    step_ = ++facts.step;
    EK_RETURN_IF_ERROR(status);
    if (checkpoints_ != nullptr) NoteSaved(checkpoints_->Poll(), /*goes_on=*/true);
    // The pieces of a device would be copies of its state.
    if (checkpoints_ != nullptr && checkpoints_->has_folder() && clock_ == nullptr &&
        !has_reserved_) {
      has_reserved_ = true;
      checkpoints_->Reserve(*setup_.model, rank == options_.ModelRank(comm_->world_size()),
                            optimizer_->Pieces());
    }
    if ((answer.requests & StepRequests::kStop) != 0) result.stopped_after = facts.step;
    AskToStop();
    return absl::OkStatus();
  };
  const auto is_save_due = [&](const StepAnswer& answer) {
    return checkpoints_ != nullptr &&
           checkpoints_->IsDue(facts.step, plan().total_steps, answer.requests);
  };
  // A job that has to stop may have little time.
  const auto is_test_due = [&](const StepAnswer& answer) {
    return IsTestDue(epoch, facts.step) && (answer.requests & StepRequests::kStop) == 0;
  };
  const auto is_sample_due = [&](const StepAnswer& answer) {
    return IsSampleDue(facts.step) && (answer.requests & StepRequests::kStop) == 0;
  };
  const auto test = [&](int root) -> absl::Status {
    EK_RETURN_IF_ERROR(TestInEpoch(root, pauses));
    begin = SteadyNow();  // No part of the next step.
    return absl::OkStatus();
  };
  pause_->on_call = [&](const StepAnswer& answer) -> absl::Status {
    EK_RETURN_IF_ERROR(ReportAll(on_step));
    if (is_test_due(answer))
      EK_RETURN_IF_ERROR(test(options_.flags.join ? answer.highest_active : 0));
    if (is_sample_due(answer) && rank == 0 && pauses.on_sample != nullptr) {
      const PhaseScope saving(*comm_, StepPhase::kSaving);
      EK_ASSIGN_OR_RETURN(const std::string text, SampleText());
      EK_RETURN_IF_ERROR(Own(pauses.on_sample(facts.step, text)));
    }
    if (is_save_due(answer)) {
      EK_RETURN_IF_ERROR(Save(epoch, facts.step, options_.flags.join ? answer.highest_active : 0));
    }
    begin = SteadyNow();
    return clock_ == nullptr ? absl::OkStatus() : Own(clock_->Start());
  };
  watch_->on_call = [&](const StepAnswer& answer) {
    if (scaler_ != nullptr) facts.loss_scale = scaler_->scale();
    facts.own.reset();
    facts.own_samples = 0;
    facts.sync = absl::ZeroDuration();
    recorder_.NotePlan(facts.step, ddp_->reducer().generation(), ddp_->buckets(),
                       setup_.model->parameters());
    recorder_.Follow(facts.step, begin);
    return finish_step(answer, {});
  };

  int64_t done = std::min(before, plan().BatchesOf(rank, epoch));
  AskToStop();
  // A rank was lost in the evaluation, or the run that was resumed had none.
  if (IsTestDue(epoch, facts.step) && best_.latest < facts.step)
    EK_RETURN_IF_ERROR(test(options_.ModelRank(comm_->world_size())));
  const absl::Status status = Loop([&]() -> absl::Status {
    if (clock_ != nullptr) EK_RETURN_IF_ERROR(Own(clock_->Start()));
    // Traces have the time of day; nothing else needs it.
    if (clock_ != nullptr && recorder_.is_on()) {
      EK_RETURN_IF_ERROR(Own(clock_->Align(SteadyNow() + comm_->timeout())));
    }
    const auto goes_on = [&] {
      return done < plan().BatchesOf(rank, epoch) && !result.stopped_after.has_value() &&
             !has_converged();
    };
    for (; goes_on(); ++done) {
      const std::span<const int32_t> samples = BatchSamples(batches, order, done);
      if (scaler_ != nullptr) facts.loss_scale = scaler_->scale();
      EK_ASSIGN_OR_RETURN(StepResult own, Step(facts.step, samples));
      facts.own_samples = static_cast<int64_t>(samples.size());
      facts.sync = Durations(ddp_->reducer().last_step()).exposed;
      if (clock_ == nullptr) {
        EK_ASSIGN_OR_RETURN(facts.own, Note(facts.step, epoch, own));
      }
      // The answer has arrived: gradients were reduced with it.
      EK_ASSIGN_OR_RETURN(const StepAnswer answer, StepControl::Of(*comm_).current()->Wait());
      EK_RETURN_IF_ERROR(finish_step(answer, std::move(own)));
      if (!is_save_due(answer) && !is_test_due(answer) && !is_sample_due(answer)) continue;
      EK_RETURN_IF_ERROR(pause_->TakePart());  // Exhausted ranks have updated their state, too.
      EK_RETURN_IF_ERROR(pause_->on_call(answer));
    }
    return ReportAll(on_step);
  });
  watch_->on_call = pause_->on_call = nullptr;
  result.stopped_early =
      options_.flags.stop_early && absl::IsOutOfRange(status) && !failed_locally_;
  if (result.stopped_early) EK_RETURN_IF_ERROR(ReportAll(on_step));
  unreported_.clear();  // Left by a failed loop.
  if (!result.stopped_early) EK_RETURN_IF_ERROR(status);
  if (result.stopped_after.has_value()) {
    EK_ASSIGN_OR_RETURN(result.checkpoint, WaitForSave());
  }

  EK_ASSIGN_OR_RETURN(result.training, SumOverRanks(*comm_, mine));
  EK_ASSIGN_OR_RETURN(result.batches_done, ExchangeValues(*comm_, "batches done", done));
  return result;
}

}  // namespace evenkeel
