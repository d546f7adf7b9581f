#include "evenkeel/trainer/app/training_run.h"

#include <limits>
#include <utility>
#include <variant>

#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/hooks/power_sgd.h"
#include "evenkeel/bucket/hooks/quantized_all_reduce.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/learning_rate.h"
#include "evenkeel/trainer/app/share_log.h"
#include "evenkeel/trainer/app/step_share.h"
#include "evenkeel/trainer/app/step_watch.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/checkpoint/stop_signals.h"
#include "evenkeel/trainer/models/place.h"
#include "evenkeel/zero_optim/lost_shard.h"
#include "evenkeel/zero_optim/parameter_groups.h"

namespace evenkeel {
namespace {

// Vectors of a language model (such as biases) do not decay.
std::vector<ParameterGroup> GroupsOf(const Model& model, const TrainOptions& options) {
  if (options.model != ModelKind::kGpt) return AllInOneGroup(model.parameters(), options.rule);
  UpdateRule without = options.rule;
  std::visit([](auto& rule) { rule.weight_decay = 0; }, without);
  std::vector<ParameterGroup> groups = {{.name = "matrices", .rule = options.rule},
                                        {.name = "vectors", .rule = std::move(without)}};
  for (int i = 0; i < model.parameters().size(); ++i)
    groups[model.shape(i).size() < 2].params.push_back(i);
  return groups;
}

Placement PlacementOf(Sharding sharding) {
  if (sharding == Sharding::kTensors) return WholeTensors{};
  if (sharding == Sharding::kSlices) return Slices{};
  return Replicated{};
}

// Returns the reduction of --comm_hook around `inner`; null for both: all-reduce.
std::unique_ptr<BucketReduction> ReductionOf(const TrainOptions& options, const Model& model,
                                             std::unique_ptr<BucketReduction> inner) {
  switch (options.comm_hook) {
    case CommHook::kNone:
      return inner;
    case CommHook::kFloat16:
      return std::make_unique<CompressedReduction>(DType::kFloat16, std::move(inner));
    case CommHook::kBFloat16:
      return std::make_unique<CompressedReduction>(DType::kBFloat16, std::move(inner));
    case CommHook::kInt8:
      return std::make_unique<QuantizedAllReduce>();
    case CommHook::kPowerSgd:
      break;
  }
  const TrainFlags& flags = options.flags;
  PowerSgdOptions power{.rank = flags.power_sgd_rank.value_or(1),
                        .start_step = flags.power_sgd_start.value_or(1000),
                        .seed = flags.seed};
  for (int i = 0; i < model.parameters().size(); ++i)
    power.shapes.push_back(MatrixOf(model.shape(i)));
  return std::make_unique<PowerSgd>(std::move(power));
}

}  // namespace

TrainingRun::TrainingRun(Communicator* comm, const TrainOptions& options, RankSetup setup,
                         RunCheckpoints* checkpoints)
    : comm_(comm),
      options_(options),
      setup_(std::move(setup)),
      watch_(std::make_unique<StepWatch>(comm, "watch", JoinPhase::kDefault)),
      pause_(std::make_unique<StepWatch>(comm, "pause", JoinPhase::kOptimizer)),
      checkpoints_(checkpoints) {}

TrainingRun::~TrainingRun() {
  // A checkpoint that is still being written uses the group.
  if (checkpoints_ != nullptr) checkpoints_->Wait(absl::InfiniteDuration());
}

absl::StatusOr<std::unique_ptr<TrainingRun>> TrainingRun::Create(Communicator* comm,
                                                                 const TrainOptions& options,
                                                                 RankSetup setup,
                                                                 RunCheckpoints* checkpoints) {
  std::unique_ptr<TrainingRun> run(new TrainingRun(comm, options, std::move(setup), checkpoints));
  EK_RETURN_IF_ERROR(run->Init());
  return run;
}

absl::Status TrainingRun::Own(absl::Status status) {
  failed_locally_ = failed_locally_ || !status.ok();
  return status;
}

absl::Status TrainingRun::Init() {
  ParameterSet& parameters = setup_.model->parameters();
  if (const DevicePlace& place = setup_.model->place(); !place.is_host()) {
    clock_ = std::make_unique<StreamClock>(*place.runtime, place.stream.ref());
  }
  samples_of_part_ = options_.flags.eval_batches > 0
                         ? options_.flags.eval_batches * options_.batch_size * comm_->world_size()
                         : std::numeric_limits<int64_t>::max();
  // The same on a newcomer, which does not know yet how the run was resumed.
  if (options_.wants_record()) recorder_ = StepRecorder(plan().total_steps);
  EK_RETURN_IF_ERROR(FindBeginning());
  begin_step_ = first_step_;
  plan_ranks_ = comm_->world_size();
  // Parameters frozen from the first step on get no optimizer state.
  ApplyFreezeSchedule(options_.freeze, first_step_, parameters);
  std::vector<TensorView> buffers;
  for (const NamedBuffer& buffer : setup_.model->buffers()) buffers.push_back(buffer.value);
  DataParallelOptions options;
  options.reducer.caps = options_.bucket_caps;
  options.reducer.gradient_as_bucket_view = options_.flags.grad_view;
  options.trainability = {.policy = options_.trainability,
                          .every = options_.check_trainable_every,
                          .warn_on_change = false};  // The report has the events of the schedule.
  options.check_replicas.every = options_.flags.check_replicas;
  if (options_.replaces) options.buffers.when = BufferTime::kStepEnd;  // None is lost with a rank.
  if (recorder_.is_on()) options.reducer.stats_every = recorder_.sampled_every();
  const LostShard lost_shard =
      options_.lost_shard_is_fresh ? LostShard::kFresh : LostShard::kRefuse;
  const std::vector<ParameterGroup> groups = GroupsOf(*setup_.model, options_);
  const OptimizerOptions placed{.placement = PlacementOf(options_.sharding),
                                .lost_shard = lost_shard,
                                .check_replicas = options.check_replicas};
  const bool composes =
      options_.comm_hook != CommHook::kNone && options_.sharding == Sharding::kSlices;
  std::unique_ptr<BucketReduction> inner;
  if (composes) {
    EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*comm_, parameters, groups, placed));
    EK_ASSIGN_OR_RETURN(inner, optimizer_->TakeReduction());
  }
  EK_ASSIGN_OR_RETURN(
      ddp_, DataParallel::Create(comm_, &parameters, std::move(buffers), std::move(options),
                                 ReductionOf(options_, *setup_.model, std::move(inner))));
  if (!composes) {
    EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*ddp_, groups, placed));
  }
  if (options_.replaces) share_ = std::make_unique<StepShare>(comm_);
  if (options_.compute == DType::kFloat16) {
    EK_ASSIGN_OR_RETURN(scaler_,
                        LossScaler::Create(comm_, {.initial_scale = options_.flags.loss_scale}));
  }
  EK_RETURN_IF_ERROR(LoadBeginning());
  return MakeBalance();
}

absl::Status TrainingRun::MakeBalance() {
  balance_.reset();
  const int64_t ranks = comm_->world_size();
  if (!options_.flags.balance || ranks == 1) return absl::OkStatus();
  // Each pass has the same part of a rank's share.
  BalanceOptions options{.batch = ranks * options_.samples_per_step(),
                         .quantum = options_.flags.accumulate * options_.pass_quantum(),
                         .repeat = std::exchange(setup_.repeat, {})};
  // After a loss of ranks the log has ended (EndShareLog).
  if (!options_.flags.balance_log.empty() && comm_->rank() == 0 && own_comm_ == nullptr) {
    options.on_change = [this, first = step_](const ShareChange& change) {
      return Own(WriteShares(options_.flags.balance_log, first + change.reduction, change.shares));
    };
  }
  EK_ASSIGN_OR_RETURN(balance_, Balance::Create(comm_, options));
  return absl::OkStatus();
}

absl::Status TrainingRun::LogGroup() {
  if (setup_.sample_log == nullptr) return absl::OkStatus();
  return Own(setup_.sample_log->EnterGroup({.number = GroupNumber(comm_->group()),
                                            .from = begin_step_,
                                            .ranks = comm_->members(),
                                            .samples = setup_.data->train->size(),
                                            .epochs = plan().epochs()}));
}

absl::Status TrainingRun::EndSampleLog() {
  if (setup_.sample_log == nullptr) return absl::OkStatus();
  EK_RETURN_IF_ERROR(LogGroup());
  return Own(setup_.sample_log->End(step_));
}

std::string TrainingRun::ShareNews() { return balance_ == nullptr ? "" : balance_->News(); }

absl::Status TrainingRun::FindBeginning() {
  const RunState* const state = checkpoints_ == nullptr ? nullptr : checkpoints_->resumed();
  if (state == nullptr) return absl::OkStatus();
  first_epoch_ = state->at.epoch;
  first_step_ = step_ = state->steps;
  saved_step_ = state->steps;
  // Losses of different data cannot be compared. Rank 0 decides: hosts may have other paths.
  const RunSettings::Values &before = state->settings.free, &now = checkpoints_->settings().free;
  const auto is_equal = [&](const std::string& name) {
    const auto a = before.find(name), b = now.find(name);
    return a != before.end() && b != now.end() && a->second == b->second;
  };
  const bool is_same = is_equal("test_data") && is_equal("eval_batches") &&
                       (options_.flags.eval_batches == 0 || checkpoints_->terms().is_exact);
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> same,
                      AgreeOn(*comm_, "setup", absl::OkStatus(), is_same ? "1" : "0"));
  if (same[0] == "1") best_ = before_latest_ = state->best;
  // The plan that assigned these samples continues; with different ranks or batches a new one
  // begins at this step.
  EK_ASSIGN_OR_RETURN(setup_.plan,
                      PlanOf(options_, *setup_.data, comm_->world_size(),
                             checkpoints_->terms().is_exact ? state->plan_begin : state->at));
  Evaluation& mine = trained_[first_epoch_];
  for (int rank = 0; rank < state->world_size; ++rank) {
    const int holder = checkpoints_->terms().is_exact ? rank : 0;
    if (holder == comm_->rank() || options_.replaces) mine += state->trained[rank];
  }
  return absl::OkStatus();
}

absl::Status TrainingRun::LoadBeginning() {
  const RunState* const state = checkpoints_ == nullptr ? nullptr : checkpoints_->resumed();
  if (state == nullptr) return absl::OkStatus();
  // Its order is the order in which gradients are added.
  EK_RETURN_IF_ERROR(checkpoints_->Explain(ddp_->ImportPlan(state->bucket_plan)));
  EK_RETURN_IF_ERROR(checkpoints_->Explain(optimizer_->Load(checkpoints_->OptimizerFolder())));
  if (scaler_ != nullptr && !state->loss_scale.empty()) {
    EK_ASSIGN_OR_RETURN(const LossScalerState scale, LossScalerState::Parse(state->loss_scale));
    EK_RETURN_IF_ERROR(scaler_->LoadState(scale));
    last_overflowed_ = state->last_overflowed;
  }
  NoteCheckpoint(checkpoints_->resumed_from());
  // After an epoch's last step all ranks have the same buffers, which came with the weights.
  const bool is_within =
      first_step_ < plan().total_steps && first_step_ < plan().FirstStep(first_epoch_ + 1);
  if (!checkpoints_->terms().is_exact || !is_within) return absl::OkStatus();
  const absl::Status loaded = checkpoints_->LoadBuffers(comm_->rank(), *setup_.model);
  return AgreeOn(*comm_, "setup", checkpoints_->Explain(loaded)).status();
}

void TrainingRun::AskToStop() {
  if (asked_to_stop_ || StopSignal() == 0) return;
  StepControl::Of(*comm_).Request(StepRequests::kStop);
  asked_to_stop_ = true;
}

LearningRateSchedule TrainingRun::learning_rates() const {
  return {.base = LearningRate(options_.rule),
          .decay = options_.decay,
          .warmup = options_.warmup,
          .total_steps = plan().total_steps};
}

std::vector<Joinable*> TrainingRun::Joinables() const {
  std::vector<Joinable*> all = {ddp_.get(), optimizer_.get(), watch_.get(), pause_.get()};
  if (share_ != nullptr) all.push_back(share_.get());
  if (scaler_ != nullptr) all.push_back(scaler_.get());
  return all;
}

}  // namespace evenkeel
