// One rank's part of a training run: the replicas of a model, their optimizer, and the loop that goes on for ranks that
// have run out of batches.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TrainingRun> run, TrainingRun::Create(&comm, options, std::move(setup)));
//   for (int epoch = 0; epoch < run->plan().epochs(); ++epoch) {
//     EK_ASSIGN_OR_RETURN(EpochResult result, run->TrainEpoch(epoch, [](const StepFacts&) { return absl::OkStatus();
//     })); if (result.stopped_early) break;
//   }
//   EK_ASSIGN_OR_RETURN(Evaluation test, run->Test());        // exact, over all ranks
//
// Every call is one that all ranks make together.
//
// When a rank is lost, the others can go on without it:
//
//   absl::StatusOr<EpochResult> result = run->TrainEpoch(epoch, on_step);
//   if (!result.ok() && !run->failed_here()) {
//     EK_ASSIGN_OR_RETURN(const GoneOn gone_on, run->GoOn(result.status()));   // gone_on.lost, gone_on.steps
//     EK_ASSIGN_OR_RETURN(epoch, run->FindPlace(epoch));                       // then TrainEpoch(epoch, ...) again
//   }
//
// The step that was interrupted is repeated, and what no finished step has used of the epoch's samples is dealt out
// over the ranks that are left.
//
// On a device the host goes ahead of it: a step's numbers are told at the end of the next one, or of the one after that,
// so that no step waits for its own, and times are the device's. A loss that is not finite shows one step late.
//
// Ownership: the communicator that it begins with outlives it; later ones are its own.
// Threads:   thread-compatible.
// Errors:    whatever ends the group. An error of this rank's own, while the group works, is said by failed_here().

#ifndef EVENKEEL_TRAINER_TRAINING_RUN_H_
#define EVENKEEL_TRAINER_TRAINING_RUN_H_

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/join.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/checkpoint/run_checkpoints.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/rank_setup.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_trace.h"
#include "evenkeel/trainer/report/stream_clock.h"
#include "evenkeel/trainer/sampler.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_data.h"
#include "evenkeel/zero_optim/loss_scaler.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/sharded_optimizer.h"
#include "evenkeel/zero_optim/sliced_optimizer.h"

namespace evenkeel {

class StepWatch;

// One step of the group as one of its ranks saw it.
struct StepFacts {
  int epoch = 0;
  int64_t step = 0;     // Of the group.
  int active = 0;       // How many ranks had a batch.
  int64_t samples = 0;  // In all their batches.
  double learning_rate = 0;
  double loss_scale = 0;           // 0: losses are not scaled.
  std::optional<BatchResult> own;  // None: this rank has run dry.
  int64_t own_samples = 0;
  absl::Duration took = absl::ZeroDuration();  // On this rank, since the end of the step before it.
  absl::Duration sync = absl::ZeroDuration();  // How long this rank waited for gradients after its backward pass.
  StepClock clock = StepClock::kHost;          // Of these two: the device's on a device, but for a rank that is dry.
  const StepTimes* times = nullptr;  // What the reducer did, and when the host did it, until on_step() returns. Null:
                                     // dry.
};

struct EpochResult {
  Evaluation training;  // Over all ranks, each batch as it was when it was trained on; those of ranks that
                        // were lost are missing.
  std::vector<int64_t> batches_done;  // By rank; since the last loss, if there was one in the epoch.
  bool stopped_early = false;         // By --stop_early, on all ranks in the same step.
  // Some rank asked all to stop (StepRequests::kStop): after which of the group's steps, and the checkpoint of it.
  std::optional<int64_t> stopped_after;
  std::string checkpoint;
};

// What was left behind.
struct GoneOn {
  std::vector<int> lost;  // By their numbers in the job's first group.
  int64_t steps = 0;      // Of the group, that all who are left had finished.
};

class TrainingRun {
 public:
  // `checkpoints` (null: none), which outlives it, says where to begin: rank 0's model has its weights already. Then it
  // gets those of this run: when they are due, when any rank asks for one (StepRequests::kSave), and when the process is
  // told to stop (stop_signals.h), or a rank asks for that.
  static absl::StatusOr<std::unique_ptr<TrainingRun>> Create(Communicator* comm, const TrainOptions& options,
                                                             RankSetup setup, RunCheckpoints* checkpoints = nullptr);
  ~TrainingRun();

  // `on_step` is called after each of the group's steps, also those that this rank had no batch for; on a device after
  // one of the two that follow. An error of it ends training on all ranks.
  absl::StatusOr<EpochResult> TrainEpoch(int epoch, absl::FunctionRef<absl::Status(const StepFacts&)> on_step);
  // Makes the ranks' buffers equal: those that the next step would begin with.
  absl::Status ShareBuffers();
  // Over the test data, or its first `most` samples, of which each rank evaluates its part, in batches as large as in
  // training. Makes the ranks' buffers equal first.
  absl::StatusOr<Evaluation> Test(int64_t most = std::numeric_limits<int64_t>::max());

  // A hash of the weights, and of the optimizer's state where every rank has the whole of it.
  // Errors: FailedPrecondition names ranks for which it differs.
  absl::StatusOr<uint64_t> AgreeOnState();

  // The optimizer's state as an unsharded one would hold it, on every rank; and back.
  absl::StatusOr<OptimizerState> ConsolidateOptimizer();
  absl::Status LoadOptimizer(const OptimizerState& state);
  // There is a checkpoint, which whoever can't go on is told of.
  void NoteCheckpoint(absl::string_view path);

  // After an error that is not this rank's own: a group of the ranks that are left, with equal weights, optimizer state
  // and buffers. `why` is the answer if nobody is lost: the ranks would do the same again.
  // Errors: those of Recover() (join/recovery.h): who is left can't go on either.
  absl::StatusOr<GoneOn> GoOn(const absl::Status& why);
  // After it: the epoch to go on with, whose plan is plan() from now on. `epochs_done` are those that this rank has
  // done with, evaluation included. Like any other call it may fail because another rank is lost: then GoOn() again.
  absl::StatusOr<int> FindPlace(int epochs_done);
  // Whether the last error came from this rank itself, and not through the group.
  bool failed_here() const { return failed_here_; }
  // Whether all ranks have that error, and have agreed on it: one of them may speak for all. The group works.
  bool failed_together() const { return failed_together_; }

  // What this rank did, for the report; and the plans that it had. Both empty unless the options ask for a report.
  RankRecord Record() const;
  // What this rank holds now.
  RankMemory MemoryHeld() const;
  const std::vector<PlanRecord>& plans() const { return recorder_.plans(); }

  Communicator& communicator() const { return *comm_; }
  // The epoch and the group's step that this run begins with.
  int first_epoch() const { return first_epoch_; }
  int64_t first_step() const { return first_step_; }
  // Changes when FindPlace() is called.
  const StepPlan& plan() const { return setup_.plan; }
  const Model& model() const { return *setup_.model; }
  const TrainingData& data() const { return *setup_.data; }

 private:
  using AnyOptimizer =
      std::variant<std::unique_ptr<Optimizer>, std::unique_ptr<ShardedOptimizer>, std::unique_ptr<SlicedOptimizer>>;
  using OnStep = absl::FunctionRef<absl::Status(const StepFacts&)>;

  // What the passes of a step answer together.
  struct StepResult {
    struct Part {
      PendingResult result;
      double share = 0;  // Of the step's samples.
    };
    std::vector<Part> parts;
  };
  // A step whose numbers a device had still to come to when it ended.
  struct Untold {
    StepFacts facts;
    StepTimes times;
    StepResult result;
    StreamMarks marks;
    bool is_noted = false;  // The device has come to its loss, though not to its end, perhaps.
  };

  TrainingRun(Communicator* comm, const TrainOptions& options, RankSetup setup, RunCheckpoints* checkpoints);
  absl::Status Init();
  // Before there is an optimizer, and after.
  absl::Status FindBeginning();
  absl::Status LoadBeginning();
  // Between two steps: the checkpoint's path.
  absl::StatusOr<std::string> Save(int epoch, int64_t steps, const StepAnswer& answer);
  void AskToStop();

  // Notes an error that is this rank's own.
  absl::Status Own(absl::Status status);
  Joinable* optimizer_joinable() const;
  LearningRateSchedule learning_rates() const;
  // Runs `loop` as the options say: joined, or bare.
  absl::Status Loop(absl::FunctionRef<absl::Status()> loop);
  absl::Status Freeze(int64_t step);
  // One of the group's steps: this rank's samples in as many passes as they need, whose gradients add up.
  absl::StatusOr<StepResult> Step(int64_t step, std::span<const int32_t> samples);
  absl::StatusOr<StepResult> Passes(int64_t step, std::span<const int32_t> samples);
  absl::StatusOr<PendingResult> Pass(int64_t step, std::span<const int32_t> samples, const PassOptions& how,
                                     absl::FunctionRef<absl::Status(int)> on_gradient);
  // Waits for what is not there yet. Adds to this rank's numbers of the epoch.
  absl::StatusOr<BatchResult> Note(int64_t step, int epoch, const StepResult& result);
  // Of an optimizer's check: on a device what it found one step before, which the host need not wait for.
  absl::Status FollowScale();
  std::vector<Joinable*> Joinables() const;
  absl::Status CheckLoss(int64_t step, double loss);
  // On a device: what the stream has done since the mark before.
  absl::Status Mark(SpanKind kind);
  // Of the steps before, those that the device has come to the end of; it has been waited for to come to their losses.
  absl::Status TellPassed(OnStep on_step);
  // All of them, waited for.
  absl::Status TellAll(OnStep on_step);
  absl::Status Tell(Untold step, OnStep on_step);

  Communicator* comm_;
  std::unique_ptr<Communicator> own_comm_;  // Null until a rank is lost.
  const TrainOptions options_;
  RankSetup setup_;
  std::unique_ptr<LossScaler> scaler_;  // Null: losses are not scaled.
  bool last_overflowed_ = false;        // Before this run began.
  AnyOptimizer optimizer_;              // Outlives the steps of what reduces for it.
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<StepWatch> watch_;
  std::unique_ptr<StepWatch> save_;

  RunCheckpoints* const checkpoints_;  // Null: none.
  int first_epoch_ = 0;
  int64_t first_step_ = 0;
  bool asked_to_stop_ = false;

  bool failed_here_ = false;
  bool failed_together_ = false;
  int64_t steps_done_ = 0;  // By all, when GoOn() was called.
  // This rank's batches of the epochs, as they were trained on; and the last of them, which may have to be repeated.
  std::map<int, Evaluation> trained_;
  struct {
    int64_t step = -1;
    int epoch = 0;
    Evaluation batch;
  } last_;
  std::unique_ptr<StreamClock> clock_;  // Null: not on a device.
  std::deque<Untold> untold_;           // On a device.
  BatchMemory memory_;
  int epoch_ = 0;  // That is under way.
  StepRecorder recorder_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAINING_RUN_H_
