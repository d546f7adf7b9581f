#include "evenkeel/trainer/training_run.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/trainer/augment.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/checkpoint/stop_signals.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/learning_rate.h"
#include "evenkeel/trainer/report/gather_records.h"
#include "evenkeel/trainer/stable_random.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/lost_shard.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel {
namespace {

uint64_t HashOf(const void* data, int64_t bytes, uint64_t seed) {
  return StableHash(seed, absl::string_view(static_cast<const char*>(data), bytes));
}

// Of a language model, vectors (biases and the like) do not decay.
std::vector<ParameterGroup> GroupsOf(const Model& model, const TrainOptions& options) {
  if (options.model != ModelKind::kGpt) return AllInOneGroup(model.parameters(), options.rule);
  UpdateRule without = options.rule;
  std::visit([](auto& rule) { rule.weight_decay = 0; }, without);
  std::vector<ParameterGroup> groups = {{.name = "matrices", .rule = options.rule},
                                        {.name = "vectors", .rule = std::move(without)}};
  for (int i = 0; i < model.parameters().size(); ++i) groups[model.shape(i).size() < 2].params.push_back(i);
  return groups;
}

constexpr int64_t kLargestEvaluationBatch = 250;

// Equal for equal arguments, and for no others.
uint64_t NoiseOf(uint64_t seed, int64_t step, int rank, int64_t pass) {
  return StableRandom(StableRandom(seed, step).Next(), rank).Next() + static_cast<uint64_t>(pass);
}

// What ranks tell each other where their tensors lie on devices, and these numbers on the host.
struct Numbers {
  std::array<int64_t, 2> counts = {};
  double loss_sum = 0;
};

absl::StatusOr<std::vector<Numbers>> ExchangeNumbers(Communicator& comm, absl::string_view topic, const Numbers& mine) {
  std::string bytes(sizeof(Numbers), '\0');
  std::memcpy(bytes.data(), &mine, sizeof(Numbers));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, comm.control().Exchange(topic, bytes, comm.timeout()));
  std::vector<Numbers> all(parts.size());
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != sizeof(Numbers)) {
      return absl::InternalError(absl::StrCat(topic, ": ", parts[rank].size(), " bytes of rank ", rank));
    }
    std::memcpy(&all[rank], parts[rank].data(), sizeof(Numbers));
  }
  return all;
}

}  // namespace

// Tells a rank that has run dry of what the others do. It takes part in the join without a collective of its own.
class TrainingRun::Watch : public Joinable {
 public:
  // Its place in a step: before the optimizer, or after it.
  Watch(Communicator* comm, absl::string_view name, JoinPhase phase) : Joinable(comm, name), phase_(phase) {}

  JoinPhase join_phase() const override { return phase_; }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }

  absl::Status TakePart() { return Notify().status(); }

  std::function<absl::Status(const StepAnswer&)> on_call;  // Set while an epoch runs.

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(Watch* watch) : watch_(watch) {}
    absl::Status MainHook(const StepAnswer& step) override { return watch_->on_call(step); }

   private:
    Watch* const watch_;
  };

  const JoinPhase phase_;
};

TrainingRun::TrainingRun(Communicator* comm, const TrainOptions& options, RankSetup setup, RunCheckpoints* checkpoints)
    : comm_(comm),
      options_(options),
      setup_(std::move(setup)),
      watch_(std::make_unique<Watch>(comm, "watch", JoinPhase::kDefault)),
      save_(std::make_unique<Watch>(comm, "save", JoinPhase::kOptimizer)),
      checkpoints_(checkpoints) {}

TrainingRun::~TrainingRun() = default;

absl::StatusOr<std::unique_ptr<TrainingRun>> TrainingRun::Create(Communicator* comm, const TrainOptions& options,
                                                                 RankSetup setup, RunCheckpoints* checkpoints) {
  std::unique_ptr<TrainingRun> run(new TrainingRun(comm, options, std::move(setup), checkpoints));
  EK_RETURN_IF_ERROR(run->Init());
  return run;
}

absl::Status TrainingRun::Own(absl::Status status) {
  failed_here_ = failed_here_ || !status.ok();
  return status;
}

absl::Status TrainingRun::Init() {
  ParameterSet& parameters = setup_.model->parameters();
  EK_RETURN_IF_ERROR(FindBeginning());
  // What is frozen from the first step on owns no optimizer state.
  ApplyFreezeSchedule(options_.freeze, first_step_, parameters);
  std::vector<TensorView> buffers;
  for (const NamedBuffer& buffer : setup_.model->buffers()) buffers.push_back(buffer.value);
  DataParallelOptions options;
  options.reducer.caps = options_.bucket_caps;
  options.reducer.gradient_as_bucket_view = options_.gradients_are_views;
  // Histograms of few values say little.
  if (!options_.tensorboard_folder.empty()) options.reducer.stats_every = 10;
  options.trainability = {.policy = options_.trainability,
                          .every = options_.check_trainable_every,
                          .warn_on_change = false};  // The report says what the schedule freezes.
  if (options_.wants_record() || options_.dry_run) {
    recorder_ = StepRecorder(plan().total_steps);
    options.reducer.stats_every = recorder_.MeasuredEvery();
  }
  const LostShard lost_shard = options_.lost_shard_is_fresh ? LostShard::kFresh : LostShard::kRefuse;
  const std::vector<ParameterGroup> groups = GroupsOf(*setup_.model, options_);
  std::unique_ptr<BucketReduction> reduction;
  if (options_.sharding == Sharding::kSlices) {
    EK_ASSIGN_OR_RETURN(auto sliced, SlicedOptimizer::Create(comm_, &parameters, groups, {.lost_shard = lost_shard}));
    reduction = sliced->TakeReduction();
    optimizer_ = std::move(sliced);
  }
  EK_ASSIGN_OR_RETURN(
      ddp_, DataParallel::Create(comm_, &parameters, std::move(buffers), std::move(options), std::move(reduction)));
  if (options_.sharding == Sharding::kTensors) {
    EK_ASSIGN_OR_RETURN(optimizer_, ShardedOptimizer::Create(comm_, &parameters, groups, {.lost_shard = lost_shard}));
  } else if (options_.sharding == Sharding::kNone) {
    EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(comm_, &parameters, groups));
  }
  if (options_.compute == DType::kFloat16) {
    EK_ASSIGN_OR_RETURN(scaler_, LossScaler::Create(comm_, {.initial_scale = options_.loss_scale}));
  }
  return LoadBeginning();
}

absl::Status TrainingRun::FindBeginning() {
  const RunState* const state = checkpoints_ == nullptr ? nullptr : checkpoints_->resumed();
  if (state == nullptr) return absl::OkStatus();
  first_epoch_ = state->at.epoch;
  first_step_ = state->steps;
  // The plan that dealt out these samples goes on; other ranks, or other batches, have one from here on.
  EK_ASSIGN_OR_RETURN(setup_.plan, PlanOf(options_, *setup_.data, comm_->world_size(),
                                          checkpoints_->terms().is_exact ? state->plan_begin : state->at));
  Evaluation& mine = trained_[first_epoch_];
  for (int rank = 0; rank < state->world_size; ++rank) {
    const int holder = checkpoints_->terms().is_exact ? rank : 0;
    if (holder == comm_->rank()) mine += state->trained[rank];
  }
  return absl::OkStatus();
}

absl::Status TrainingRun::LoadBeginning() {
  const RunState* const state = checkpoints_ == nullptr ? nullptr : checkpoints_->resumed();
  if (state == nullptr) return absl::OkStatus();
  // Its order decides in which order gradients are added.
  EK_RETURN_IF_ERROR(checkpoints_->Explain(ddp_->ImportPlan(state->bucket_plan)));
  EK_RETURN_IF_ERROR(checkpoints_->Explain(
      std::visit([&](auto& optimizer) { return optimizer->Load(checkpoints_->OptimizerFolder()); }, optimizer_)));
  if (scaler_ != nullptr && !state->loss_scale.empty()) {
    EK_ASSIGN_OR_RETURN(const LossScalerState scale, LossScalerState::Parse(state->loss_scale));
    EK_RETURN_IF_ERROR(scaler_->LoadState(scale));
    last_overflowed_ = state->last_overflowed;
  }
  NoteCheckpoint(checkpoints_->resumed_from());
  // After an epoch's last step all ranks have the same buffers, which came with the weights.
  const bool is_within = first_step_ < plan().total_steps && first_step_ < plan().FirstStep(first_epoch_ + 1);
  if (!checkpoints_->terms().is_exact || !is_within) return absl::OkStatus();
  const absl::Status loaded = checkpoints_->LoadBuffers(comm_->rank(), *setup_.model);
  return AgreeOnSetup(*comm_, checkpoints_->Explain(loaded));
}

absl::StatusOr<std::string> TrainingRun::Save(int epoch, int64_t steps, const StepAnswer& answer) {
  EK_RETURN_IF_ERROR(ddp_->RebuildNow());  // As the next step would: its plan is the one to be saved.
  RunToSave run{.state = {.steps = steps,
                          .at = plan().PositionAfter(steps, epoch),
                          .world_size = comm_->world_size(),
                          .plan_begin = plan().begin,
                          .bucket_plan = ddp_->ExportPlan()},
                .model = setup_.model.get(),
                .model_rank = options_.joins ? answer.highest_active : 0,
                .trained = trained_[epoch],
                .optimizer_name = optimizer_joinable()->join_name(),
                .optimizer_steps = optimizer_joinable()->steps_finished()};
  if (scaler_ != nullptr) {
    const auto& check = std::visit([](auto& optimizer) { return optimizer->last_check(); }, optimizer_);
    run.state.loss_scale = scaler_->state().Serialize();
    run.state.last_overflowed = check.has_value() ? !check->is_finite : last_overflowed_;
  }
  EK_ASSIGN_OR_RETURN(run.optimizer, std::visit([](auto& optimizer) { return optimizer->Pieces(); }, optimizer_));
  absl::StatusOr<std::string> path = checkpoints_->Save(*comm_, std::move(run));
  if (path.ok()) {
    NoteCheckpoint(*path);
  } else if (comm_->status().ok()) {  // All ranks have this error.
    failed_here_ = failed_together_ = true;
    // Who leaves before all have heard of it would be taken for lost. If somebody really is, that is known by now.
    comm_->control().Exchange("no checkpoint", "", comm_->timeout()).status().IgnoreError();
  }
  return path;
}

void TrainingRun::AskToStop() {
  if (checkpoints_ == nullptr || asked_to_stop_ || StopSignal() == 0) return;
  comm_->steps().Request(StepRequests::kStop);
  asked_to_stop_ = true;
}

Joinable* TrainingRun::optimizer_joinable() const {
  return std::visit([](const auto& optimizer) -> Joinable* { return optimizer.get(); }, optimizer_);
}

LearningRateSchedule TrainingRun::learning_rates() const {
  return {.base = LearningRate(options_.rule),
          .decay = options_.decay,
          .warmup = options_.warmup,
          .total_steps = plan().total_steps};
}

std::vector<Joinable*> TrainingRun::Joinables() const {
  std::vector<Joinable*> all = {ddp_.get(), optimizer_joinable(), watch_.get(), save_.get()};
  if (scaler_ != nullptr) all.push_back(scaler_.get());
  return all;
}

absl::Status TrainingRun::FollowScale() {
  if (scaler_ == nullptr) return absl::OkStatus();
  const std::optional<GradientCheck> check =
      std::visit([](auto& optimizer) { return optimizer->check_before(); }, optimizer_);
  const bool before = std::exchange(last_overflowed_, false);
  return scaler_->Update(check.has_value() ? !check->is_finite : before);
}

absl::Status TrainingRun::Loop(absl::FunctionRef<absl::Status()> loop) {
  if (!options_.joins) return loop();
  const JoinOptions options{.throw_on_early_termination = options_.stops_early, .divide_by = options_.divide_by};
  return RunJoined(Joinables(), options, [&](JoinScope&) { return loop(); });
}

absl::Status TrainingRun::Freeze(int64_t step) {
  ParameterSet& parameters = setup_.model->parameters();
  const uint64_t version = parameters.mask_version();
  ApplyFreezeSchedule(options_.freeze, step, parameters);
  // A check that comes only every n-th step, or never, would miss it.
  if (parameters.mask_version() == version || options_.trainability == TrainabilityPolicy::kAlways) {
    return absl::OkStatus();
  }
  return ddp_->RefreshTrainable();
}

absl::Status TrainingRun::CheckLoss(int64_t step, double loss) {
  if (std::isfinite(loss)) return absl::OkStatus();
  return Own(absl::OutOfRangeError(absl::StrCat("the loss is ", loss, " in step ", step,
                                                ": a lower --lr, a longer --warmup or --clip may keep it finite")));
}

bool TrainingRun::StepResult::is_there() const {
  return std::ranges::all_of(parts, [](const Part& part) { return part.result.is_there(); });
}

absl::StatusOr<BatchResult> TrainingRun::Note(int64_t step, int epoch, const StepResult& result) {
  BatchResult whole;
  for (const auto& [pending, share] : result.parts) {
    const absl::StatusOr<BatchResult> pass = pending.Wait(absl::Now() + comm_->timeout());
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

absl::Status TrainingRun::TellLast(OnStep on_step) {
  if (!untold_.has_value()) return absl::OkStatus();
  Untold step = *std::exchange(untold_, std::nullopt);
  EK_ASSIGN_OR_RETURN(step.facts.own, Note(step.facts.step, step.facts.epoch, step.result));
  step.facts.times = &step.times;
  return Own(on_step(step.facts));
}

absl::StatusOr<PendingResult> TrainingRun::Pass(int64_t step, std::span<const int32_t> samples, const PassOptions& how,
                                                absl::FunctionRef<absl::Status(int)> on_gradient) {
  const Batch batch = setup_.data->train->Gather(samples, memory_);
  if (setup_.data->image.has_value() && (options_.augment.mirrors || options_.augment.max_shift > 0)) {
    Augment(options_.augment, *setup_.data->image, epoch_, samples, memory_.images);
  }
  recorder_.Mark(SpanKind::kData);
  absl::StatusOr<PendingResult> result = setup_.model->StartForward(batch, Mode::kTraining, how);
  recorder_.Mark(SpanKind::kForward);
  if (absl::IsResourceExhausted(result.status())) {
    return Own(absl::ResourceExhaustedError(absl::StrCat(
        result.status().message(), "; a smaller --batch_size takes less, and --accumulate makes up for it")));
  }
  EK_RETURN_IF_ERROR(Own(result.status()));
  if (result->is_there()) EK_RETURN_IF_ERROR(CheckLoss(step, result->Wait(absl::InfinitePast())->loss_mean));
  absl::Status announced;
  const absl::Status backward = setup_.model->Backward([&](int index) {
    announced.Update(on_gradient(index));
    return announced;
  });
  EK_RETURN_IF_ERROR(announced);
  EK_RETURN_IF_ERROR(Own(backward));
  recorder_.Mark(SpanKind::kBackward);
  return result;
}

absl::StatusOr<TrainingRun::StepResult> TrainingRun::Passes(int64_t step, std::span<const int32_t> samples) {
  const double all = static_cast<double>(samples.size());
  const bool wants_sums = options_.joins && options_.divide_by == DivideBy::kSamples;
  const double scale = scaler_ == nullptr ? 1.0 : scaler_->scale();
  StepResult result;
  for (size_t first = 0; first < samples.size(); first += options_.batch_size) {
    const auto part = samples.subspan(first, std::min<size_t>(options_.batch_size, samples.size() - first));
    const bool is_last = first + part.size() == samples.size();
    const double share = static_cast<double>(part.size()) / all;
    EK_ASSIGN_OR_RETURN(PendingResult pass,
                        Pass(step, part,
                             {.weight = scale * (wants_sums ? static_cast<double>(part.size()) : share),
                              .noise = NoiseOf(options_.seed, step, comm_->rank(), static_cast<int64_t>(first))},
                             [&](int index) { return is_last ? ddp_->GradientReady(index) : absl::OkStatus(); }));
    result.parts.push_back({std::move(pass), share});
  }
  return result;
}

absl::StatusOr<TrainingRun::StepResult> TrainingRun::Step(int64_t step, std::span<const int32_t> samples) {
  recorder_.Begin(step);
  EK_RETURN_IF_ERROR(Freeze(step));
  const double learning_rate = LearningRate(learning_rates(), step);
  EK_RETURN_IF_ERROR(
      Own(std::visit([&](auto& optimizer) { return optimizer->SetLearningRate(learning_rate); }, optimizer_)));

  setup_.model->parameters().ClearGradients();
  comm_->steps().AddSamples(static_cast<int64_t>(samples.size()));
  EK_RETURN_IF_ERROR(ddp_->BeginStep());
  recorder_.NotePlan(step, ddp_->reducer().generation(), ddp_->buckets(), setup_.model->parameters());
  recorder_.Mark(SpanKind::kBegin);
  absl::StatusOr<StepResult> result = Passes(step, samples);
  EK_RETURN_IF_ERROR(result.status());
  EK_RETURN_IF_ERROR(ddp_->FinishStep());
  recorder_.Mark(SpanKind::kWait);
  EK_RETURN_IF_ERROR(watch_->TakePart());
  StepOptions how;
  if (options_.clip > 0) how.clip = ClipOptions{.max_norm = options_.clip};
  if (scaler_ != nullptr) {
    how.grad_scale = 1 / scaler_->scale();
    how.skip_nonfinite = true;
  }
  EK_RETURN_IF_ERROR(std::visit([&](auto& optimizer) { return optimizer->Step(how); }, optimizer_));
  EK_RETURN_IF_ERROR(FollowScale());
  recorder_.Mark(SpanKind::kOptimizer);
  recorder_.End(ddp_->reducer().last_step(), ddp_->buckets());
  return result;
}

absl::StatusOr<EpochResult> TrainingRun::TrainEpoch(int epoch,
                                                    absl::FunctionRef<absl::Status(const StepFacts&)> on_step) {
  const int rank = comm_->rank();
  const BatchPlan batches{.samples = setup_.data->train->size(),
                          .first = epoch == plan().begin.epoch ? plan().begin.samples : 0,
                          .batch_size = options_.samples_per_step(),
                          .rank = rank,
                          .world_size = comm_->world_size()};
  const std::vector<int32_t> order =
      options_.shuffle ? ShuffledOrder(batches.samples, options_.seed, epoch) : InOrder(batches.samples);

  epoch_ = epoch;
  const Evaluation& mine = trained_[epoch];
  // Another run has done those before it.
  const int64_t before = std::max<int64_t>(0, first_step_ - plan().FirstStep(epoch));
  StepFacts facts{.epoch = epoch, .step = plan().FirstStep(epoch) + before};
  absl::Time begin = absl::Now();
  EpochResult result;
  const auto finish_step = [&](const StepAnswer& answer, StepResult pending) -> absl::Status {
    const absl::Time end = absl::Now();
    facts.took = end - std::exchange(begin, end);
    facts.active = answer.active;
    facts.samples = answer.samples;
    facts.learning_rate = LearningRate(learning_rates(), facts.step);
    absl::Status status = TellLast(on_step);
    if (pending.is_there()) {
      if (status.ok()) status = Own(on_step(facts));
    } else {
      untold_ = Untold{.facts = facts, .times = *facts.times, .result = std::move(pending)};
    }
    ++facts.step;
    EK_RETURN_IF_ERROR(status);
    if ((answer.requests & StepRequests::kStop) != 0) result.stopped_after = facts.step;
    AskToStop();
    return absl::OkStatus();
  };
  save_->on_call = [&](const StepAnswer& answer) -> absl::Status {
    EK_RETURN_IF_ERROR(TellLast(on_step));
    EK_ASSIGN_OR_RETURN(result.checkpoint, Save(epoch, facts.step, answer));
    return absl::OkStatus();
  };
  watch_->on_call = [&](const StepAnswer& answer) {
    if (scaler_ != nullptr) facts.loss_scale = scaler_->scale();
    facts.own.reset();
    facts.own_samples = 0;
    facts.sync = absl::ZeroDuration();
    facts.times = nullptr;
    recorder_.NotePlan(facts.step, ddp_->reducer().generation(), ddp_->buckets(), setup_.model->parameters());
    recorder_.Follow(facts.step, begin);
    return finish_step(answer, {});
  };

  int64_t done = std::min(before, plan().BatchesOf(rank, epoch));
  AskToStop();
  const absl::Status status = Loop([&]() -> absl::Status {
    for (; done < plan().BatchesOf(rank, epoch) && !result.stopped_after.has_value(); ++done) {
      const std::span<const int32_t> samples = BatchSamples(batches, order, done);
      if (scaler_ != nullptr) facts.loss_scale = scaler_->scale();
      EK_ASSIGN_OR_RETURN(StepResult own, Step(facts.step, samples));
      facts.own_samples = static_cast<int64_t>(samples.size());
      facts.times = &ddp_->reducer().last_step();
      facts.sync = Durations(*facts.times).exposed;
      if (own.is_there()) {
        EK_ASSIGN_OR_RETURN(facts.own, Note(facts.step, epoch, own));
      }
      // The answer is there: gradients were reduced with it.
      EK_ASSIGN_OR_RETURN(const StepAnswer answer, comm_->steps().current()->Wait());
      EK_RETURN_IF_ERROR(finish_step(answer, std::move(own)));
      if (checkpoints_ == nullptr || !checkpoints_->IsDue(facts.step, plan().total_steps, answer.requests)) continue;
      EK_RETURN_IF_ERROR(save_->TakePart());  // Dry ranks have updated what they hold, too.
      EK_RETURN_IF_ERROR(save_->on_call(answer));
    }
    return TellLast(on_step);
  });
  watch_->on_call = save_->on_call = nullptr;
  result.stopped_early = options_.stops_early && absl::IsOutOfRange(status) && !failed_here_;
  if (result.stopped_early) EK_RETURN_IF_ERROR(TellLast(on_step));
  untold_.reset();  // Of a loop that has failed.
  if (!result.stopped_early) EK_RETURN_IF_ERROR(status);

  EK_ASSIGN_OR_RETURN(result.training, SumOverRanks(mine));
  result.batches_done.resize(comm_->world_size());
  if (comm_->device().is_cpu()) {
    EK_RETURN_IF_ERROR(comm_->AllGather(absl::MakeSpan(&done, 1), absl::MakeSpan(result.batches_done)));
    return result;
  }
  EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all, ExchangeNumbers(*comm_, "batches done", {.counts = {done}}));
  std::ranges::transform(all, result.batches_done.begin(), [](const Numbers& rank) { return rank.counts[0]; });
  return result;
}

absl::StatusOr<Evaluation> TrainingRun::Test(int64_t most) {
  // Those that the next step would begin with: the highest rank's after joined steps, rank 0's after others.
  const int root = options_.joins ? comm_->world_size() - 1 : 0;
  std::vector<TensorView> buffers;
  for (const NamedBuffer& buffer : setup_.model->buffers()) buffers.push_back(buffer.value);
  const CallOptions after{.after = setup_.model->place().stream.ref()};
  if (!buffers.empty()) EK_RETURN_IF_ERROR(comm_->user().Broadcast(buffers, root, after).Wait());

  const int64_t size = std::min(most, setup_.data->test->size());
  const int64_t begin = size * comm_->rank() / comm_->world_size();
  const int64_t end = size * (comm_->rank() + 1) / comm_->world_size();
  EK_ASSIGN_OR_RETURN(const Evaluation mine, Evaluate(*setup_.model, *setup_.data->test, begin, end,
                                                      std::min(options_.batch_size, kLargestEvaluationBatch)));
  return SumOverRanks(mine);
}

absl::StatusOr<uint64_t> TrainingRun::AgreeOnState() {
  uint64_t hash = 0;
  EK_ASSIGN_OR_RETURN(const HostTensors tensors, setup_.model->ToHost());
  for (const TensorView& value : tensors.values) hash = HashOf(value.data, value.bytes(), hash);
  if (const auto* whole = std::get_if<std::unique_ptr<Optimizer>>(&optimizer_)) {
    const OptimizerState state = (*whole)->state();
    for (const auto& [index, parameter] : state.params) {
      hash = StableHash(StableHash(hash, index), parameter.step);
      for (const auto& [name, tensor] : parameter.tensors) hash = HashOf(tensor.data(), tensor.bytes(), hash);
    }
  }
  const std::string mine = absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm_->control().Exchange("state hash", mine, comm_->timeout()));
  const auto other =
      std::find_if(parts.begin(), parts.end(), [&](const std::string& part) { return part != parts[0]; });
  if (other == parts.end()) return hash;
  const std::vector<int>& members = comm_->members();
  return absl::FailedPreconditionError(absl::StrCat("ranks ", members[0], " and ", members[other - parts.begin()],
                                                    " do not have the same weights and optimizer state: hashes ",
                                                    parts[0], " and ", *other));
}

absl::StatusOr<OptimizerState> TrainingRun::ConsolidateOptimizer() {
  const auto consolidate = [](auto& optimizer) -> absl::StatusOr<OptimizerState> {
    if constexpr (requires { optimizer->Consolidate(); }) {
      return optimizer->Consolidate();
    } else {
      return optimizer->state();
    }
  };
  return std::visit(consolidate, optimizer_);
}

RankMemory TrainingRun::MemoryHeld() const {
  RankMemory memory{.activations = setup_.model->ActivationBytes(), .peak_resident = PeakResidentBytes()};
  const ParameterSet& parameters = setup_.model->parameters();
  for (int i = 0; i < parameters.size(); ++i) memory.parameters += parameters[i].value.bytes();
  if (!options_.gradients_are_views) memory.gradients = memory.parameters;
  for (const BucketInfo& bucket : ddp_->buckets()) memory.buckets += bucket.data.bytes();
  memory.optimizer = std::visit([](const auto& optimizer) { return optimizer->state_bytes(); }, optimizer_);
  return memory;
}

RankRecord TrainingRun::Record() const {
  if (!recorder_.is_on()) return {};
  const ReducerStats stats = ddp_->reducer().stats();
  return {.rank = comm_->members()[comm_->rank()],
          .host = HostName(),
          .process = getpid(),
          .steps = stats.steps,
          .followed = stats.shadowed_steps,
          .memory = MemoryHeld(),
          .means = {.steps = stats.means.measured_steps,
                    .to_first_gradient_us = stats.means.to_first_gradient_us,
                    .backward_us = stats.means.backward_us,
                    .communication_us = stats.means.communication_us,
                    .exposed_us = stats.means.exposed_us},
          .traces = recorder_.traces()};
}

absl::Status TrainingRun::LoadOptimizer(const OptimizerState& state) {
  return std::visit([&](auto& optimizer) { return optimizer->LoadState(state); }, optimizer_);
}

void TrainingRun::NoteCheckpoint(absl::string_view path) {
  const auto note = [path](auto& optimizer) {
    if constexpr (requires { optimizer->SetCheckpointHint(path); }) optimizer->SetCheckpointHint(path);
  };
  std::visit(note, optimizer_);
}

absl::StatusOr<GoneOn> TrainingRun::GoOn(const absl::Status& why) {
  const std::vector<int> members = comm_->members();
  std::vector<Joinable*> with_state = {ddp_.get(), optimizer_joinable(), watch_.get()};
  if (scaler_ != nullptr) with_state.push_back(scaler_.get());
  absl::StatusOr<Recovered> recovered = Recover(with_state, *comm_, {.why = why});
  if (!recovered.ok()) {
    const absl::Status& status = recovered.status();
    if (absl::StrContains(status.message(), why.message())) return status;
    return absl::Status(status.code(), absl::StrCat(why.message(), "; ", status.message()));
  }
  own_comm_ = std::move(recovered->comm);
  comm_ = own_comm_.get();
  asked_to_stop_ = false;                                                 // This group has not been asked.
  save_ = std::make_unique<Watch>(comm_, "save", JoinPhase::kOptimizer);  // It has no state to recover.
  if (recovered->lost.empty()) return why;
  steps_done_ = recovered->steps;
  if (last_.step >= steps_done_) {
    trained_[last_.epoch] -= last_.batch;
    last_.step = -1;
  }
  GoneOn gone_on{.steps = steps_done_};
  for (int rank : recovered->lost) gone_on.lost.push_back(members[rank]);
  return gone_on;
}

absl::StatusOr<int> TrainingRun::FindPlace(int epochs_done) {
  // Between two epochs the number of steps does not say whether the last one has been evaluated.
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm_->control().Exchange("epochs done", absl::StrCat(epochs_done), comm_->timeout()));
  for (const std::string& part : parts) {
    int theirs = 0;
    if (!absl::SimpleAtoi(part, &theirs)) return absl::InternalError("a malformed number of epochs");
    epochs_done = std::min(epochs_done, theirs);
  }
  EK_ASSIGN_OR_RETURN(setup_.plan, plan().GoOn(plan().PositionAfter(steps_done_, epochs_done), comm_->world_size()));
  return plan().begin.epoch;
}

absl::StatusOr<Evaluation> TrainingRun::SumOverRanks(const Evaluation& mine) {
  if (!comm_->device().is_cpu()) {
    EK_ASSIGN_OR_RETURN(
        const std::vector<Numbers> all,
        ExchangeNumbers(*comm_, "evaluation", {.counts = {mine.predictions, mine.correct}, .loss_sum = mine.loss_sum}));
    Evaluation sum;
    for (const Numbers& rank : all) {
      sum += {.predictions = rank.counts[0], .correct = rank.counts[1], .loss_sum = rank.loss_sum};
    }
    return sum;
  }
  int64_t counts[] = {mine.predictions, mine.correct};
  double loss_sum = mine.loss_sum;
  EK_RETURN_IF_ERROR(comm_->AllReduce(absl::MakeSpan(counts), ReduceOp::kSum));
  EK_RETURN_IF_ERROR(comm_->AllReduce(absl::MakeSpan(&loss_sum, 1), ReduceOp::kSum));
  return Evaluation{.predictions = counts[0], .correct = counts[1], .loss_sum = loss_sum};
}

}  // namespace evenkeel
