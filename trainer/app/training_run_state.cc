// The work between steps: evaluation, comparing, saving, loading and describing the state, and
// continuing without a lost rank.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/trainer/app/step_watch.h"
#include "evenkeel/trainer/app/sum_over_ranks.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/report/gather_records.h"

namespace evenkeel {
namespace {

uint64_t HashOf(const void* data, int64_t bytes, uint64_t seed) {
  return StableHash(seed, absl::string_view(static_cast<const char*>(data), bytes));
}

constexpr int64_t kLargestEvaluationBatch = 250;

}  // namespace

absl::StatusOr<std::string> TrainingRun::Save(int epoch, int64_t steps, const StepAnswer& answer) {
  const PhaseScope saving(*comm_, StepPhase::kSaving);
  EK_RETURN_IF_ERROR(ddp_->RebuildNow());  // As the next step would: its plan is saved.
  RunToSave run{.state = {.steps = steps,
                          .at = plan().PositionAfter(steps, epoch),
                          .world_size = comm_->world_size(),
                          .plan_begin = plan().begin,
                          .bucket_plan = ddp_->ExportPlan()},
                .model = setup_.model.get(),
                .model_rank = options_.joins ? answer.highest_active : 0,
                .trained = trained_[epoch],
                .optimizer_name = optimizer_->join_name(),
                .optimizer_steps = optimizer_->steps_finished()};
  if (scaler_ != nullptr) {
    const auto& check = optimizer_->last_check();
    run.state.loss_scale = scaler_->state().Serialize();
    run.state.last_overflowed = check.has_value() ? !check->is_finite : last_overflowed_;
  }
  EK_ASSIGN_OR_RETURN(run.optimizer, optimizer_->Pieces());
  EK_ASSIGN_OR_RETURN(run.ranks, GatherRecords(*comm_, Record()));
  absl::StatusOr<std::string> path = checkpoints_->Save(*comm_, std::move(run));
  if (path.ok()) {
    NoteCheckpoint(*path);
  } else if (comm_->status().ok()) {  // All ranks have this error.
    failed_locally_ = failed_together_ = true;
    // A rank that leaves before all ranks have the error would be taken for lost. If a rank really
    // is lost, the group has the error by now.
    comm_->control().Exchange("no checkpoint", "", comm_->timeout()).status().IgnoreError();
  }
  return path;
}

absl::Status TrainingRun::ShareBuffers() {
  // The highest rank's after joined steps, else rank 0's.
  const int root = options_.joins ? comm_->world_size() - 1 : 0;
  std::vector<TensorView> buffers;
  for (const NamedBuffer& buffer : setup_.model->buffers()) buffers.push_back(buffer.value);
  const CallOptions after{.after = setup_.model->place().stream.ref()};
  return buffers.empty() ? absl::OkStatus() : comm_->user().Broadcast(buffers, root, after).Wait();
}

absl::StatusOr<Evaluation> TrainingRun::Test(int64_t most) {
  EK_RETURN_IF_ERROR(ShareBuffers());
  const int64_t size = std::min(most, setup_.data->test->size());
  const int64_t begin = size * comm_->rank() / comm_->world_size();
  const int64_t end = size * (comm_->rank() + 1) / comm_->world_size();
  EK_ASSIGN_OR_RETURN(const Evaluation mine,
                      Evaluate(*setup_.model, *setup_.data->test, begin, end,
                               std::min(options_.batch_size, kLargestEvaluationBatch)));
  return SumOverRanks(*comm_, mine);
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
                    .peak_resident = PeakResidentBytes()};
  const ParameterSet& parameters = setup_.model->parameters();
  for (int i = 0; i < parameters.size(); ++i) memory.parameters += parameters[i].value.bytes();
  if (!options_.gradients_are_views) memory.gradients = memory.parameters;
  for (const BucketInfo& bucket : ddp_->buckets()) memory.buckets += bucket.data.bytes();
  memory.optimizer = optimizer_->state_bytes();
  return memory;
}

RankRecord TrainingRun::Record() const {
  const ReducerStats stats = ddp_->reducer().stats();
  const bool is_device = clock_ != nullptr;
  const StepMeans means = is_device ? recorder_.device_means() : stats.means;
  return {.rank = comm_->members()[comm_->rank()],
          .host = HostName(),
          .process = getpid(),
          .steps = stats.steps,
          .followed = stats.shadowed_steps,
          .memory = MemoryHeld(),
          .means = {.steps = means.measured_steps,
                    .to_first_gradient_us = means.to_first_gradient_us,
                    .backward_us = means.backward_us,
                    .communication_us = is_device ? kUnknown : means.communication_us,
                    .exposed_us = means.exposed_us,
                    .clock = is_device ? StepClock::kDevice : StepClock::kHost},
          .traces = recorder_.traces()};
}

void TrainingRun::NoteCheckpoint(absl::string_view path) { optimizer_->SetCheckpointHint(path); }

absl::StatusOr<GoneOn> TrainingRun::GoOn(const absl::Status& why) {
  const std::vector<int> members = comm_->members();
  std::vector<Joinable*> with_state = {ddp_.get(), optimizer_.get(), watch_.get()};
  if (scaler_ != nullptr) with_state.push_back(scaler_.get());
  absl::StatusOr<Recovered> recovered = Recover(with_state, *comm_, {.why = why});
  if (!recovered.ok()) {
    const absl::Status& status = recovered.status();
    if (absl::StrContains(status.message(), why.message())) return status;
    return absl::Status(status.code(), absl::StrCat(why.message(), "; ", status.message()));
  }
  own_comm_ = std::move(recovered->comm);
  comm_ = own_comm_.get();
  asked_to_stop_ = false;  // The new group was not asked yet.
  save_ = std::make_unique<StepWatch>(comm_, "save",
                                      JoinPhase::kOptimizer);  // It has no state to recover.
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
  // Between two epochs the number of steps does not show whether the last one was evaluated.
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      comm_->control().Exchange("epochs done", absl::StrCat(epochs_done), comm_->timeout()));
  for (const std::string& part : parts) {
    int theirs = 0;
    if (!absl::SimpleAtoi(part, &theirs))
      return absl::InternalError("received a malformed number of epochs (internal error)");
    epochs_done = std::min(epochs_done, theirs);
  }
  EK_ASSIGN_OR_RETURN(setup_.plan, plan().GoOn(plan().PositionAfter(steps_done_, epochs_done),
                                               comm_->world_size()));
  return plan().begin.epoch;
}

}  // namespace evenkeel
