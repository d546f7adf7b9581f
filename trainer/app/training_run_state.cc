// The work between steps: evaluation, comparing, saving, loading and describing the state, and
// continuing without a lost rank.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/trainer/app/step_share.h"
#include "evenkeel/trainer/app/step_watch.h"
#include "evenkeel/trainer/app/sum_over_ranks.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/checkpoint/stop_signals.h"
#include "evenkeel/trainer/gpt/generate_tokens.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/report/gather_records.h"

namespace evenkeel {
namespace {

// The wait for a newcomer in the place of a lost rank.
constexpr absl::Duration kWaitForReplacement = absl::Seconds(10);

// The epochs that a rank has finished, its evaluations, and the plan of its steps.
struct Place {
  bool is_newcomer = false;  // It has entered, and has none of the rest.
  int epochs_done = 0;
  int latest_epoch = 0;
  BestTest best;
  BestTest before_latest;
  int plan_ranks = 0;
  int begin_epoch = 0;
  int64_t begin_step = 0, begin_samples = 0;
  int trained_epoch = 0;
  Evaluation trained;
  int epoch = 0;
  int64_t saved_step = -1;
  std::string job;  // RunCheckpoints::job().
  int sample_attempt = 0;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.is_newcomer, self.epochs_done, self.latest_epoch, self.best, self.before_latest,
          self.plan_ranks, self.begin_epoch, self.begin_step, self.begin_samples,
          self.trained_epoch, self.trained, self.epoch, self.saved_step, self.job,
          self.sample_attempt);
  }
};

uint64_t HashOf(const void* data, int64_t bytes, uint64_t seed) {
  return StableHash(seed, absl::string_view(static_cast<const char*>(data), bytes));
}

}  // namespace

absl::Status TrainingRun::Save(int epoch, int64_t steps, int model_rank) {
  const PhaseScope saving(*comm_, StepPhase::kSaving);
  const absl::Time begin = SteadyNow();  // The step waits from here on.
  // Less than the other ranks wait in the next step for one whose disk is slow.
  NoteSaved(checkpoints_->Wait(comm_->timeout() / 2), /*goes_on=*/true);
  EK_RETURN_IF_ERROR(ddp_->RebuildNow());  // As the next step would: its plan is saved.
  RunToSave run{.state = {.steps = steps,
                          .at = plan().PositionAfter(steps, epoch),
                          .world_size = comm_->world_size(),
                          .plan_begin = plan().begin,
                          .bucket_plan = ddp_->ExportPlan(),
                          .best = best_},
                .model = setup_.model.get(),
                .model_rank = model_rank,
                // With share_ each rank has the numbers of all.
                .trained = share_ != nullptr && comm_->rank() > 0 ? Evaluation() : trained_[epoch],
                .record = Record(),
                .optimizer = optimizer_->Pieces(),
                .optimizer_name = optimizer_->join_name(),
                .optimizer_steps = optimizer_->steps_finished(),
                .begin = begin};
  if (scaler_ != nullptr) {
    const auto& check = optimizer_->last_check();
    run.state.loss_scale = scaler_->state().Serialize();
    run.state.last_overflowed = check.has_value() ? !check->is_finite : last_overflowed_;
  }
  checkpoints_->Start(*comm_, std::move(run));
  saved_step_ = steps;
  save_is_left_ = false;
  return absl::OkStatus();
}

void TrainingRun::NoteSaved(const std::optional<EndedCheckpoint>& ended, bool goes_on) {
  if (!ended.has_value()) return;
  if (!checkpoints_->is_writing()) left_comms_.clear();
  if (ended->status.ok()) {
    NoteCheckpoint(ended->path);
  } else if (saved_step_ == ended->step) {
    saved_step_ = -1;
  }
  if (on_saved_ != nullptr) on_saved_(*ended, goes_on);
}

absl::StatusOr<std::string> TrainingRun::WaitForSave() {
  if (checkpoints_ == nullptr) return "";
  // Waits for other ranks have deadlines in it; this rank's disk has none.
  const std::optional<EndedCheckpoint> ended = checkpoints_->Wait(absl::InfiniteDuration());
  NoteSaved(ended, /*goes_on=*/save_is_left_);
  if (!ended.has_value() || save_is_left_) return "";
  if (ended->status.ok()) return ended->path;
  if (comm_->status().ok()) {
    // All ranks have this error, unless rank 0 did not send it in time.
    failed_locally_ = true;
    failed_together_ = !absl::IsDeadlineExceeded(ended->status);
    // A rank that leaves before all ranks have the error would be taken for lost. If a rank really
    // is lost, the group has the error by now.
    comm_->control().Exchange("no checkpoint", "", comm_->timeout()).status().IgnoreError();
  }
  return Annotate(ended->status, absl::StrCat("the checkpoint of step ", ended->step, " failed"));
}

absl::Status TrainingRun::FinishSaves() {
  if (checkpoints_ == nullptr || !checkpoints_->has_folder()) return absl::OkStatus();
  const bool is_last = has_converged() || step_ == plan().total_steps;
  // Save() waits for an older one, whose failure does not prevent the last one.
  if (!is_last || saved_step_ == step_) EK_RETURN_IF_ERROR(WaitForSave().status());
  if (!is_last) return absl::OkStatus();
  // After a lost rank 0 the ranks may have seen different checkpoints in the folder.
  EK_ASSIGN_OR_RETURN(const auto saved,
                      AgreeOn(*comm_, "saved", absl::OkStatus(), absl::StrCat(saved_step_)));
  const std::string mine = absl::StrCat(step_);
  if (std::ranges::all_of(saved, [&](const std::string& step) { return step == mine; }))
    return absl::OkStatus();
  // All ranks have the same buffers.
  EK_RETURN_IF_ERROR(Save(epoch_, step_, comm_->world_size() - 1));
  return WaitForSave().status();
}

absl::Status TrainingRun::ShareBuffers() {
  // The highest rank's after joined steps, else rank 0's.
  return ShareBuffersOf(options_.ModelRank(comm_->world_size()));
}

absl::Status TrainingRun::ShareBuffersOf(int root) {
  std::vector<TensorView> buffers;
  for (const NamedBuffer& buffer : setup_.model->buffers()) buffers.push_back(buffer.value);
  const CallOptions after{.after = setup_.model->place().stream.ref()};
  return buffers.empty() ? absl::OkStatus() : comm_->user().Broadcast(buffers, root, after).Wait();
}

absl::StatusOr<Evaluation> TrainingRun::Test() {
  EK_RETURN_IF_ERROR(ShareBuffers());
  return TestWithoutSharing(std::numeric_limits<int64_t>::max());
}

absl::StatusOr<Evaluation> TrainingRun::TestWithoutSharing(int64_t most) {
  const int64_t size = std::min(most, setup_.data->test->size());
  const int64_t begin = size * comm_->rank() / comm_->world_size();
  const int64_t end = size * (comm_->rank() + 1) / comm_->world_size();
  const absl::StatusOr<Evaluation> mine =
      Evaluate(*setup_.model, *setup_.data->test, begin, end,
               std::min(options_.batch_size, kLargestEvaluationBatch));
  EK_RETURN_IF_ERROR(Own(mine.status()));
  return SumOverRanks(*comm_, *mine);
}

absl::Status TrainingRun::TestInEpoch(int root, const Pauses& pauses) {
  // The rank whose buffers are shared may be exhausted in the next step, which then begins with
  // those of another rank.
  std::vector<std::string> kept;
  if (!setup_.model->buffers().empty()) {
    const absl::StatusOr<HostTensors> own = setup_.model->ToHost();
    EK_RETURN_IF_ERROR(Own(own.status()));
    for (const TensorView& buffer : own->buffers)
      kept.emplace_back(static_cast<const char*>(buffer.data), buffer.bytes());
  }
  EK_RETURN_IF_ERROR(ShareBuffersOf(root));
  EK_ASSIGN_OR_RETURN(const Evaluation test, TestWithoutSharing(samples_of_part_));
  const TestResult result = UpdateBest(test);
  // Before the buffers are restored: the weights may be saved with those that were evaluated.
  if (pauses.on_test != nullptr) EK_RETURN_IF_ERROR(Own(pauses.on_test(result)));
  if (kept.empty()) return absl::OkStatus();
  const absl::StatusOr<HostTensors> shared = setup_.model->ToHost();
  EK_RETURN_IF_ERROR(Own(shared.status()));
  for (size_t i = 0; i < kept.size(); ++i)
    std::copy(kept[i].begin(), kept[i].end(), static_cast<char*>(shared->buffers[i].data));
  return Own(setup_.model->FromHost(*shared));
}

absl::StatusOr<TestResult> TrainingRun::TestEpoch() {
  EK_ASSIGN_OR_RETURN(const Evaluation test, Test());
  // Losses of different data cannot be compared.
  if (options_.flags.eval_batches > 0) return TestResult{.steps = step_, .test = test};
  return UpdateBest(test);
}

TestResult TrainingRun::UpdateBest(const Evaluation& test) {
  TestResult result{.steps = step_, .test = test};
  if (best_.latest >= step_) return result;  // Evaluated already.
  before_latest_ = best_;
  latest_epoch_ = epoch_;
  best_.latest = step_;
  ++best_.since;
  const double loss = test.loss_mean();
  result.is_best = std::isfinite(loss) && (best_.step == 0 || loss < best_.loss);
  if (result.is_best) best_ = {.loss = loss, .step = step_, .latest = step_};
  return result;
}

absl::StatusOr<std::string> TrainingRun::SampleText() {
  std::string text = options_.flags.sample_prompt;
  EK_RETURN_IF_ERROR(
      Own(GenerateText(dynamic_cast<Gpt&>(*setup_.model), options_.flags.sample_prompt,
                       {.count = options_.flags.sample_tokens, .seed = options_.flags.seed},
                       [&](absl::string_view piece) {
                         absl::StrAppend(&text, piece);
                         return absl::OkStatus();
                       })));
  return text;
}

absl::StatusOr<uint64_t> TrainingRun::AgreeOnState() {
  uint64_t hash = 0;
  EK_ASSIGN_OR_RETURN(const HostTensors tensors, setup_.model->ToHost());
  for (const TensorView& value : tensors.values) hash = HashOf(value.data, value.bytes(), hash);
  if (std::holds_alternative<Replicated>(optimizer_->placement())) {
    const OptimizerState state = optimizer_->state();
    for (const auto& [index, parameter] : state.params) {
      hash = StableHash(StableHash(hash, index), parameter.step);
      for (const auto& [name, tensor] : parameter.tensors)
        hash = HashOf(tensor.data(), tensor.bytes(), hash);
    }
  }
  const std::string mine = absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm_->control().Exchange("state hash", mine, comm_->timeout()));
  const auto other = std::find_if(parts.begin(), parts.end(),
                                  [&](const std::string& part) { return part != parts[0]; });
  if (other == parts.end()) return hash;
  const std::vector<int>& members = comm_->members();
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks ", members[0], " and ", members[other - parts.begin()],
      " do not have the same weights and optimizer state: hashes ", parts[0], " and ", *other));
}

RankMemory TrainingRun::MemoryHeld() const {
  RankMemory memory{.activations = setup_.model->ActivationBytes(),
                    .data = setup_.data->train->held_bytes() + setup_.data->test->held_bytes(),
                    .peak_resident = PeakResidentBytes()};
  const ParameterSet& parameters = setup_.model->parameters();
  for (int i = 0; i < parameters.size(); ++i) memory.parameters += parameters[i].value.bytes();
  memory.gradients = memory.parameters;
  for (const BucketInfo& bucket : ddp_->buckets()) memory.buckets += bucket.data.bytes();
  memory.optimizer = optimizer_->state_bytes();
  if (checkpoints_ != nullptr) memory.copies = checkpoints_->copy_bytes();
  return memory;
}

RankRecord TrainingRun::Record() const {
  return {.rank = comm_->members()[comm_->rank()],
          .host = HostName(),
          .memory = MemoryHeld(),
          .traces = recorder_.traces()};
}

void TrainingRun::NoteCheckpoint(absl::string_view path) { optimizer_->SetCheckpointHint(path); }

absl::StatusOr<GoneOn> TrainingRun::GoOn(const absl::Status& why) {
  std::optional<EndedCheckpoint> ended;
  if (checkpoints_ != nullptr) ended = checkpoints_->Poll();
  const std::vector<int> members = comm_->members();
  std::vector<Joinable*> with_state = Joinables();
  std::erase(with_state, pause_.get());
  if (ended.has_value() && ended->status.ok()) NoteCheckpoint(ended->path);
  // After a signal to stop, which all ranks of a job get, no newcomer is started.
  const bool waits = options_.replaces && StopSignal() == 0;
  // The other ranks may be in an evaluation, or write the best weights.
  const RecoveryOptions how{
      .timeout = absl::Minutes(2) + comm_->timeout(),
      .wait_for_replacement = waits ? kWaitForReplacement : absl::ZeroDuration(),
      .why = why};
  is_newcomer_ = is_newcomer_ || comm_->waiting();
  absl::StatusOr<Recovered> recovered =
      comm_->waiting() ? Enter(with_state, *comm_, how) : Recover(with_state, *comm_, how);
  if (!recovered.ok()) {
    const absl::Status& status = recovered.status();
    if (absl::StrContains(status.message(), why.message())) return status;
    return absl::Status(status.code(), absl::StrCat(why.message(), "; ", status.message()));
  }
  balance_.reset();  // It uses the group.
  save_is_left_ = checkpoints_ != nullptr && checkpoints_->is_writing();
  if (save_is_left_) left_comms_.push_back(std::move(own_comm_));
  own_comm_ = std::move(recovered->comm);
  comm_ = own_comm_.get();
  NoteSaved(ended, /*goes_on=*/true);  // The new rank 0 reports it.
  asked_to_stop_ = false;              // The new group was not asked yet.
  pause_ = std::make_unique<StepWatch>(comm_, "pause",
                                       JoinPhase::kOptimizer);  // It has no state to recover.
  if (recovered->lost.empty()) return why;
  steps_done_ = recovered->steps;
  if (last_.step >= steps_done_) {
    trained_[last_.epoch] = last_.before;
    last_.step = -1;
  }
  GoneOn gone_on{.steps = steps_done_, .repaired = std::move(recovered->repaired)};
  for (int rank : recovered->lost) gone_on.lost.push_back(members[rank]);
  for (int rank : recovered->entered) gone_on.replaced.push_back(comm_->members()[rank]);
  return gone_on;
}

absl::StatusOr<int> TrainingRun::FindPlace(int epochs_done) {
  // Between two epochs the number of steps does not show whether the last one was evaluated.
  step_ = steps_done_;
  Place mine{.is_newcomer = is_newcomer_,
             .epochs_done = is_newcomer_ ? std::numeric_limits<int>::max() : epochs_done,
             .latest_epoch = latest_epoch_,
             .best = best_,
             .before_latest = before_latest_,
             .plan_ranks = plan_ranks_,
             .begin_epoch = plan().begin.epoch,
             .begin_step = plan().begin.step,
             .begin_samples = plan().begin.samples,
             .epoch = epoch_,
             .saved_step = save_is_left_ ? -1 : saved_step_,
             .job = checkpoints_ == nullptr ? "" : checkpoints_->job()};
  if (!trained_.empty()) {
    mine.trained_epoch = trained_.rbegin()->first;
    mine.trained = trained_.rbegin()->second;
  }
  SampleLog* const log = setup_.sample_log.get();
  if (log != nullptr) mine.sample_attempt = log->attempt();
  EK_ASSIGN_OR_RETURN(const std::vector<Place> places,
                      ExchangeValues<Place>(*comm_, "place", mine));
  for (const Place& place : places)
    mine.epochs_done = std::min(mine.epochs_done, place.epochs_done);
  epochs_done = mine.epochs_done;
  const auto found = std::ranges::find(places, false, &Place::is_newcomer);
  if (found == places.end()) {
    return absl::FailedPreconditionError(
        "all ranks have taken the places of lost ones, and none knows the numbers of the epoch");
  }
  const Place& source = *found;
  latest_epoch_ = source.latest_epoch;
  best_ = source.best;
  before_latest_ = source.before_latest;
  // It will be repeated: rank 0 may have been lost before it saved the weights.
  if (best_.latest == step_ && epochs_done <= latest_epoch_) best_ = before_latest_;
  if (share_ != nullptr) trained_[source.trained_epoch] = source.trained;
  saved_step_ = source.saved_step;
  if (is_newcomer_) {
    epoch_ = source.epoch;
    if (checkpoints_ != nullptr) checkpoints_->SetJob(source.job);
    if (log != nullptr) log->SetAttempt(source.sample_attempt);
    plan_ranks_ = source.plan_ranks;
    EK_ASSIGN_OR_RETURN(setup_.plan,
                        PlanOf(options_, *setup_.data, plan_ranks_,
                               {source.begin_epoch, source.begin_step, source.begin_samples}));
    is_newcomer_ = false;
  }
  const EpochPosition at = plan().PositionAfter(steps_done_, epochs_done);
  begin_step_ = steps_done_;
  // Where all lost ranks are replaced, the plan goes on, and so the run is the same.
  if (comm_->world_size() == plan_ranks_) return at.epoch;
  plan_ranks_ = comm_->world_size();
  EK_ASSIGN_OR_RETURN(setup_.plan, plan().GoOn(at, plan_ranks_));
  EK_RETURN_IF_ERROR(MakeBalance());
  return plan().begin.epoch;
}

}  // namespace evenkeel
