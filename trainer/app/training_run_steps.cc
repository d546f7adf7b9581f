// The work of an epoch: its steps, the passes of a step, and their reports.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
#include "evenkeel/trainer/app/step_share.h"
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

double NormOf(const TrainOptions& options, const std::optional<GradientCheck>& check) {
  // A check without clipping has another norm.
  return options.clip > 0 && check.has_value() ? check->norm : kUnknown;
}

Evaluation EvaluationOf(const BatchResult& result) {
  return {.predictions = result.predictions,
          .correct = result.correct,
          .loss_sum = result.loss_mean * static_cast<double>(result.predictions)};
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

absl::StatusOr<BatchResult> TrainingRun::ResultOf(int64_t step, const StepResult& result) {
  BatchResult whole;
  for (const auto& [pending, share] : result.passes) {
    const absl::StatusOr<BatchResult> pass = pending.Wait(SteadyNow() + comm_->timeout());
    EK_RETURN_IF_ERROR(Own(pass.status()));
    EK_RETURN_IF_ERROR(CheckLoss(step, pass->loss_mean));
    whole.predictions += pass->predictions;
    whole.correct += pass->correct;
    whole.loss_mean += pass->loss_mean * share;
  }
  return whole;
}

void TrainingRun::AddUp(int64_t step, int epoch, const Evaluation& batch) {
  last_ = {.step = step, .epoch = epoch, .before = trained_[epoch]};
  trained_[epoch] += batch;
}

absl::StatusOr<BatchResult> TrainingRun::Note(int64_t step, int epoch, const StepResult& result) {
  EK_ASSIGN_OR_RETURN(const BatchResult whole, ResultOf(step, result));
  AddUp(step, epoch, share_ == nullptr ? EvaluationOf(whole) : shared_);
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
    if (step.facts.own.has_value()) continue;
    absl::StatusOr<BatchResult> own = Note(step.facts.step, step.facts.epoch, step.result);
    status = own.status();
    if (!status.ok()) break;  // The steps before it have passed, and are reported all the same.
    step.facts.own = *std::move(own);
  }
  while (!unreported_.empty() && unreported_.front().facts.own.has_value()) {
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

absl::StatusOr<TrainingRun::StepResult> TrainingRun::Passes(int64_t step, const Part& mine) {
  const std::span<const int32_t> samples = mine.samples;
  const double all = static_cast<double>(samples.size());
  const bool wants_sums = options_.flags.join && options_.divide_by == DivideBy::kSamples;
  const double scale = scaler_ == nullptr ? 1.0 : scaler_->scale();
  StepResult result;
  // With other shares as many passes of another size, which then have the same overhead.
  const size_t passes = options_.flags.accumulate;
  const size_t most =
      balance_ == nullptr ? options_.batch_size : (samples.size() + passes - 1) / passes;
  for (size_t first = 0; first < samples.size(); first += most) {
    const auto part = samples.subspan(first, std::min(most, samples.size() - first));
    const bool is_last = first + part.size() == samples.size();
    const double share = static_cast<double>(part.size()) / all;
    EK_ASSIGN_OR_RETURN(
        PendingResult pass,
        Pass(step, part,
             {.weight = scale * (wants_sums ? static_cast<double>(part.size()) : share),
              .noise = StableRandom(options_.flags.seed, step).Next(),
              .first_sample = mine.place + static_cast<int64_t>(first)},
             [&](int index) -> absl::Status {
               return is_last ? ddp_->GradientReady(index) : absl::OkStatus();
             }));
    result.passes.push_back({std::move(pass), share});
  }
  return result;
}

absl::StatusOr<TrainingRun::StepResult> TrainingRun::Step(int64_t step, const Part& mine) {
  recorder_.Begin(step);
  if (clock_ != nullptr) {
    clock_->Begin(recorder_.IsSampled(step) ? StreamClock::Detail::kParts
                                            : StreamClock::Detail::kSummary);
  }
  EK_RETURN_IF_ERROR(Freeze(step));
  const double learning_rate = LearningRate(learning_rates(), step);
  EK_RETURN_IF_ERROR(Own(optimizer_->SetLearningRate(learning_rate)));

  setup_.model->parameters().ClearGradients();
  StepControl::Of(*comm_).AddSamples(static_cast<int64_t>(mine.samples.size()));
  EK_RETURN_IF_ERROR(ddp_->BeginStep());
  recorder_.NotePlan(step, ddp_->reducer().generation(), ddp_->buckets(),
                     setup_.model->parameters());
  EK_RETURN_IF_ERROR(Mark(SpanKind::kBegin));
  absl::StatusOr<StepResult> result = Passes(step, mine);
  EK_RETURN_IF_ERROR(result.status());
  if (share_ != nullptr) {
    EK_ASSIGN_OR_RETURN(const BatchResult own, ResultOf(step, *result));
    EK_RETURN_IF_ERROR(share_->Start(EvaluationOf(own)));
  }
  EK_RETURN_IF_ERROR(ddp_->FinishStep());
  EK_RETURN_IF_ERROR(Mark(SpanKind::kWait));
  if (share_ != nullptr) {
    EK_ASSIGN_OR_RETURN(shared_, share_->Wait());
  }
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

// The state of a call of TrainEpoch(): for its loop, and for the steps that this rank shadows when
// it is exhausted.
class TrainingRun::EpochLoop {
 public:
  EpochLoop(TrainingRun& run, int epoch, OnStep on_step, const Pauses& pauses)
      : run_(run), epoch_(epoch), on_step_(on_step), pauses_(pauses) {
    facts_.epoch = epoch;
    facts_.step = run.plan().FirstStep(epoch) + before_;
    run.watch_->on_call = [this](const StepAnswer& answer) { return Follow(answer); };
    run.pause_->on_call = [this](const StepAnswer& answer) { return Pause(answer); };
    if (run.share_ != nullptr)
      run.share_->on_shared = [&run](const Evaluation& all) { run.shared_ = all; };
  }
  ~EpochLoop() { run_.watch_->on_call = run_.pause_->on_call = nullptr; }

  absl::StatusOr<EpochResult> Run();

 private:
  // Trains this rank's batches.
  absl::Status Train();
  // Returns this rank's part of the next step's batch; a short one may have no sample for it.
  absl::StatusOr<Part> NextPart(const BatchPlan& batches, std::span<const int32_t> order);
  absl::Status TrainBatch(const Part& mine);
  // Records a step for which this rank had no batch.
  absl::Status Follow(const StepAnswer& answer);
  // Reports the step, and begins the next one.
  absl::Status FinishStep(const StepAnswer& answer, StepResult pending);
  absl::Status ReportStep(StepResult pending);
  void FollowSaves();
  // Evaluates, samples and saves, whichever is due after a step.
  absl::Status Pause(const StepAnswer& answer);

  bool IsSaveDue(const StepAnswer& answer) const {
    return run_.checkpoints_ != nullptr &&
           run_.checkpoints_->IsDue(facts_.step, run_.plan().total_steps, answer.requests);
  }
  // `every`: in steps; 0: never. Not due if the job has to stop: it may have little time.
  bool IsDue(int64_t every, const StepAnswer& answer) const {
    return every > 0 && facts_.step % every == 0 && (answer.requests & StepRequests::kStop) == 0;
  }
  bool IsSampleDue(const StepAnswer& answer) const {
    return IsDue(run_.options_.flags.sample_every, answer);
  }
  // An epoch ends with an evaluation of all the data, which a whole one here would repeat.
  bool IsTestDue(const StepAnswer& answer) const {
    const TrainFlags& flags = run_.options_.flags;
    return IsDue(flags.eval_every, answer) && facts_.step > 0 &&
           (flags.eval_batches > 0 || facts_.step != run_.plan().FirstStep(epoch_ + 1));
  }
  bool GoesOn() const {
    return done_ < run_.plan().BatchesOf(run_.comm_->rank(), epoch_) &&
           !result_.stopped_after.has_value() && !run_.has_converged();
  }
  int RootOf(const StepAnswer& answer) const {
    return run_.options_.flags.join ? answer.highest_active : 0;
  }

  TrainingRun& run_;
  const int epoch_;
  const OnStep on_step_;
  const Pauses& pauses_;
  // The number of the epoch's steps that an earlier run has done.
  const int64_t before_ = std::max<int64_t>(0, run_.begin_step_ - run_.plan().FirstStep(epoch_));
  int64_t done_ = std::min(before_, run_.plan().BatchesOf(run_.comm_->rank(), epoch_));
  StepFacts facts_;  // Of the current step.
  absl::Time begin_ = SteadyNow();
  EpochResult result_;
};

absl::Status TrainingRun::EpochLoop::ReportStep(StepResult pending) {
  facts_.gradient_norm = kUnknown;
  const bool has_batch = facts_.own_samples > 0;
  if (run_.clock_ == nullptr || !has_batch) {
    if (has_batch) facts_.gradient_norm = NormOf(run_.options_, run_.optimizer_->last_check());
    EK_RETURN_IF_ERROR(run_.ReportAll(on_step_));
    return run_.Own(on_step_(facts_));
  }
  std::deque<UnreportedStep>& unreported = run_.unreported_;
  // The norm of the step before, for which the host does not wait.
  if (!unreported.empty()) {
    unreported.back().facts.gradient_norm = NormOf(run_.options_, run_.optimizer_->check_before());
  }
  const absl::Status status = run_.ReportPassed(on_step_);
  unreported.push_back(
      {.facts = facts_, .result = std::move(pending), .marks = run_.clock_->End()});
  return status;
}

void TrainingRun::EpochLoop::FollowSaves() {
  if (run_.checkpoints_ == nullptr) return;
  run_.NoteSaved(run_.checkpoints_->Poll(), /*goes_on=*/true);
  // The pieces of a device would be copies of its state.
  if (!run_.checkpoints_->has_folder() || run_.clock_ != nullptr || run_.has_reserved_) return;
  run_.has_reserved_ = true;
  const Communicator& comm = *run_.comm_;
  run_.checkpoints_->Reserve(*run_.setup_.model,
                             comm.rank() == run_.options_.ModelRank(comm.world_size()),
                             run_.optimizer_->Pieces());
}

absl::Status TrainingRun::EpochLoop::FinishStep(const StepAnswer& answer, StepResult pending) {
  const absl::Time end = SteadyNow();
  facts_.took = end - std::exchange(begin_, end);
  facts_.active = answer.active;
  facts_.samples = answer.samples;
  facts_.learning_rate = LearningRate(run_.learning_rates(), facts_.step);
  const absl::Status reported = ReportStep(std::move(pending));
  run_.step_ = ++facts_.step;
  EK_RETURN_IF_ERROR(reported);
  FollowSaves();
  if ((answer.requests & StepRequests::kStop) != 0) result_.stopped_after = facts_.step;
  run_.AskToStop();
  return absl::OkStatus();
}

absl::Status TrainingRun::EpochLoop::Pause(const StepAnswer& answer) {
  EK_RETURN_IF_ERROR(run_.ReportAll(on_step_));
  if (IsTestDue(answer)) EK_RETURN_IF_ERROR(run_.TestInEpoch(RootOf(answer), pauses_));
  if (IsSampleDue(answer) && run_.comm_->rank() == 0 && pauses_.on_sample != nullptr) {
    const PhaseScope saving(*run_.comm_, StepPhase::kSaving);
    EK_ASSIGN_OR_RETURN(const std::string text, run_.SampleText());
    EK_RETURN_IF_ERROR(run_.Own(pauses_.on_sample(facts_.step, text)));
  }
  if (IsSaveDue(answer)) EK_RETURN_IF_ERROR(run_.Save(epoch_, facts_.step, RootOf(answer)));
  begin_ = SteadyNow();  // The pause is no part of the next step.
  return run_.clock_ == nullptr ? absl::OkStatus() : run_.Own(run_.clock_->Start());
}

absl::Status TrainingRun::EpochLoop::Follow(const StepAnswer& answer) {
  if (run_.scaler_ != nullptr) facts_.loss_scale = run_.scaler_->scale();
  facts_.own.reset();
  facts_.own_samples = 0;
  facts_.sync = absl::ZeroDuration();
  if (run_.share_ != nullptr) run_.AddUp(facts_.step, epoch_, run_.shared_);
  run_.recorder_.NotePlan(facts_.step, run_.ddp_->reducer().generation(), run_.ddp_->buckets(),
                          run_.setup_.model->parameters());
  run_.recorder_.Follow(facts_.step, begin_);
  return FinishStep(answer, {});
}

absl::Status TrainingRun::EpochLoop::TrainBatch(const Part& mine) {
  if (run_.scaler_ != nullptr) facts_.loss_scale = run_.scaler_->scale();
  const int64_t every = run_.options_.flags.eval_every;
  // An interval with an evaluation does not measure speed.
  if (every > 0 && (facts_.step + 1) % every == 0)
    StepControl::Of(*run_.comm_).Request(StepRequests::kEvaluate);
  // Before it contributes: if it is lost then, the others may finish the step.
  if (SampleLog* const log = run_.setup_.sample_log.get(); log != nullptr)
    EK_RETURN_IF_ERROR(run_.Own(log->Write(facts_.step, epoch_, mine.samples)));
  EK_ASSIGN_OR_RETURN(StepResult own, run_.Step(facts_.step, mine));
  facts_.own_samples = static_cast<int64_t>(mine.samples.size());
  facts_.sync = Durations(run_.ddp_->reducer().last_step()).exposed;
  if (run_.clock_ == nullptr) {
    EK_ASSIGN_OR_RETURN(facts_.own, run_.Note(facts_.step, epoch_, own));
  }
  // The answer has arrived: the gradients have been reduced with it.
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, StepControl::Of(*run_.comm_).current()->Wait());
  EK_RETURN_IF_ERROR(FinishStep(answer, std::move(own)));
  if (!IsSaveDue(answer) && !IsTestDue(answer) && !IsSampleDue(answer)) return absl::OkStatus();
  EK_RETURN_IF_ERROR(run_.pause_->TakePart());  // Exhausted ranks have updated their state, too.
  return Pause(answer);
}

absl::StatusOr<TrainingRun::Part> TrainingRun::EpochLoop::NextPart(const BatchPlan& batches,
                                                                   std::span<const int32_t> order) {
  if (run_.balance_ == nullptr) {
    return Part{.samples = BatchSamples(batches, order, done_),
                .place = batches.rank * batches.batch_size};
  }
  const int64_t whole = batches.world_size * batches.batch_size;
  const int64_t first = batches.first + done_ * whole;
  EK_ASSIGN_OR_RETURN(const Share mine,
                      run_.balance_->Next(first, std::min(whole, batches.samples - first)));
  return Part{.samples = order.subspan(mine.first, mine.count), .place = mine.first - first};
}

absl::Status TrainingRun::EpochLoop::Train() {
  const TrainOptions& options = run_.options_;
  const StepPlan& plan = run_.plan();
  const BatchPlan batches{.samples = run_.setup_.data->train->size(),
                          .first = epoch_ == plan.begin.epoch ? plan.begin.samples : 0,
                          .batch_size = options.samples_per_step(),
                          .rank = run_.comm_->rank(),
                          .world_size = run_.comm_->world_size()};
  const std::vector<int32_t> order =
      options.flags.shuffle ? ShuffledOrder(batches.samples, options.flags.seed, epoch_)
                            : InOrder(batches.samples);
  return run_.Loop([&]() -> absl::Status {
    if (run_.clock_ != nullptr) EK_RETURN_IF_ERROR(run_.Own(run_.clock_->Start()));
    // Traces have the time of day; nothing else needs it.
    if (run_.clock_ != nullptr && run_.recorder_.is_on()) {
      EK_RETURN_IF_ERROR(run_.Own(run_.clock_->Align(SteadyNow() + run_.comm_->timeout())));
    }
    for (; GoesOn(); ++done_) {
      EK_ASSIGN_OR_RETURN(const Part mine, NextPart(batches, order));
      if (mine.samples.empty()) break;
      EK_RETURN_IF_ERROR(TrainBatch(mine));
    }
    return run_.ReportAll(on_step_);
  });
}

absl::StatusOr<EpochResult> TrainingRun::EpochLoop::Run() {
  const Evaluation& mine = run_.trained_[epoch_];
  run_.AskToStop();
  // A rank was lost in the evaluation, or the run that was resumed had none.
  if (IsTestDue(/*answer=*/{}) && run_.best_.latest < facts_.step) {
    const int root = run_.options_.ModelRank(run_.comm_->world_size());
    EK_RETURN_IF_ERROR(run_.TestInEpoch(root, pauses_));
    begin_ = SteadyNow();
  }
  const absl::Status status = Train();
  result_.stopped_early =
      run_.options_.flags.stop_early && absl::IsOutOfRange(status) && !run_.failed_locally_;
  if (result_.stopped_early) EK_RETURN_IF_ERROR(run_.ReportAll(on_step_));
  run_.unreported_.clear();  // Left by a failed loop.
  if (!result_.stopped_early) EK_RETURN_IF_ERROR(status);
  if (result_.stopped_after.has_value()) {
    EK_ASSIGN_OR_RETURN(result_.checkpoint, run_.WaitForSave());
  }
  if (run_.share_ != nullptr) {
    result_.training = mine;
  } else {
    EK_ASSIGN_OR_RETURN(result_.training, SumOverRanks(*run_.comm_, mine));
  }
  EK_ASSIGN_OR_RETURN(result_.batches_done, ExchangeValues(*run_.comm_, "batches done", done_));
  return std::move(result_);
}

absl::StatusOr<EpochResult> TrainingRun::TrainEpoch(int epoch, OnStep on_step,
                                                    const Pauses& pauses) {
  epoch_ = epoch;
  EK_RETURN_IF_ERROR(LogGroup());
  return EpochLoop(*this, epoch, on_step, pauses).Run();
}

}  // namespace evenkeel
