// One rank's part of a training run: its replica of the model, the optimizer, and the loop, in
// which an exhausted rank shadows the active ranks.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TrainingRun> run,
//                       TrainingRun::Create(&comm, options, std::move(setup)));
//   for (int epoch = 0; epoch < run->plan().epochs(); ++epoch) {
//     EK_ASSIGN_OR_RETURN(EpochResult result, run->TrainEpoch(epoch, [](const StepFacts&) {
//       return absl::OkStatus();
//     })); if (result.stopped_early) break;
//   }
//   EK_ASSIGN_OR_RETURN(Evaluation test, run->Test());        // exact, over all ranks
//
// All ranks make every call together.
//
// When a rank is lost, the others can continue without it:
//
//   absl::StatusOr<EpochResult> result = run->TrainEpoch(epoch, on_step);
//   if (!result.ok() && !run->failed_locally()) {
//     // gone_on.lost, gone_on.steps
//     EK_ASSIGN_OR_RETURN(const GoneOn gone_on, run->GoOn(result.status()));
//     EK_ASSIGN_OR_RETURN(epoch, run->FindPlace(epoch));  // then TrainEpoch(epoch, ...) again
//   }
//
// The interrupted step is repeated, and the samples of the epoch that no finished step has used are
// redistributed over the remaining ranks.
//
// On a device the host runs ahead: a step's numbers are reported at the end of the next step or of
// the one after it, so that no step waits for its own numbers, and times are the device's. A loss
// that is not finite is reported one step late.
//
// Ownership: the initial communicator outlives it; it owns later ones.
// Threads:   thread-compatible.
// Errors:    those that end the group. After an error of this rank, with a working group,
//            failed_locally() returns true.

#ifndef EVENKEEL_TRAINER_APP_TRAINING_RUN_H_
#define EVENKEEL_TRAINER_APP_TRAINING_RUN_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/join/join.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/step_facts.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/checkpoint/run_checkpoints.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_trace.h"
#include "evenkeel/trainer/report/stream_clock.h"
#include "evenkeel/zero_optim/loss_scaler.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

class DataParallel;
class StepShare;
class StepWatch;

struct EpochResult {
  Evaluation training;  // Over all ranks, each batch when it was used for training; those of
                        // lost ranks are missing.
  std::vector<int64_t>
      batches_done;  // By rank; since the last loss of a rank, if there was one in the epoch.
  bool stopped_early = false;  // By --stop_early, on all ranks in the same step.
  // The number of the group's steps after which the ranks stopped because one of them asked for it
  // (StepRequests::kStop), and the path of their checkpoint, which is complete.
  std::optional<int64_t> stopped_after;
  std::string checkpoint;
};

// An evaluation of the test data.
struct TestResult {
  int64_t steps = 0;  // Steps of the group before it.
  Evaluation test;
  bool is_best = false;  // Its loss is the lowest so far.
};

// Called between two steps, at `steps` of the group; null: nothing.
struct Pauses {
  std::function<absl::Status(const TestResult& result)> on_test;
  // On rank 0 of the group: a text that the model has written.
  std::function<absl::Status(int64_t steps, const std::string& text)> on_sample;
};

// The result of a recovery.
struct GoneOn {
  std::vector<int> lost;              // By their numbers in the job's first group.
  std::vector<int> replaced;          // Those of them in whose place another process continues.
  int64_t steps = 0;                  // Steps of the group that all remaining ranks had finished.
  std::vector<std::string> repaired;  // Damage of replicas (Recovered::repaired).
};

class TrainingRun {
 public:
  // `checkpoints` (null: none) outlives it and has the beginning of the run, whose weights rank 0's
  // model has already. The run writes its checkpoints to it: when they are due, when a rank asks
  // for one (StepRequests::kSave), and when the process is told to stop (stop_signals.h) or a rank
  // asks for it. They are written in the background; one that fails does not end the run, unless it
  // is the last one.
  static absl::StatusOr<std::unique_ptr<TrainingRun>> Create(Communicator* comm,
                                                             const TrainOptions& options,
                                                             RankSetup setup,
                                                             RunCheckpoints* checkpoints = nullptr);
  ~TrainingRun();

  // Calls `on_step` after each of the group's steps, also those for which this rank had no batch;
  // on a device after one of the next two steps; and `pauses` for what the options ask for between
  // two steps. Their errors end training on all ranks.
  absl::StatusOr<EpochResult> TrainEpoch(int epoch,
                                         absl::FunctionRef<absl::Status(const StepFacts&)> on_step,
                                         const Pauses& pauses = {});
  // Evaluates all the test data at the end of an epoch.
  absl::StatusOr<TestResult> TestEpoch();
  // Returns whether the last evaluation ended the training (--patience).
  bool has_converged() const {
    return options_.flags.patience > 0 && best_.since >= options_.flags.patience;
  }
  // Returns false if no evaluation has had a finite loss.
  bool has_best() const { return best_.step > 0; }
  // Called on each rank when the writing of a checkpoint has ended, between two steps. `goes_on`:
  // an error does not end the run.
  using OnSaved = std::function<void(const EndedCheckpoint& ended, bool goes_on)>;
  void SetOnSaved(OnSaved on_saved) { on_saved_ = std::move(on_saved); }
  // Waits, at the end of the run, for the checkpoint that is being written, and writes one if the
  // last step has none. Returns the same error on all ranks.
  absl::Status FinishSaves();
  // Makes the ranks' buffers equal to those with which the next epoch would begin.
  absl::Status ShareBuffers();
  // Evaluates the test data; each rank evaluates a part, in batches as large as in training. Makes
  // the ranks' buffers equal first.
  absl::StatusOr<Evaluation> Test();

  // Returns a hash of the weights, and of the optimizer's state if every rank has all of it.
  // Errors: FailedPrecondition names ranks whose hashes differ.
  absl::StatusOr<uint64_t> AgreeOnState();

  // Return and set the optimizer's state as that of an unsharded optimizer, on every rank.
  absl::StatusOr<OptimizerState> ConsolidateOptimizer() { return optimizer_->Consolidate(); }
  absl::Status LoadOptimizer(const OptimizerState& state) { return optimizer_->LoadState(state); }
  // Notes a checkpoint, which is reported to a rank that cannot continue.
  void NoteCheckpoint(absl::string_view path);

  // Recovers after an error that is not this rank's own: forms a group of the remaining ranks, and
  // of newcomers in the places of lost ones, with equal weights, optimizer state and buffers.
  // Returns `why` if no rank is lost, since the ranks would fail again. A newcomer calls it first,
  // with OK.
  // Errors: those of Recover() (join/recovery.h): the remaining ranks cannot continue either.
  absl::StatusOr<GoneOn> GoOn(const absl::Status& why);
  // Returns, after GoOn(), the epoch to continue with, whose plan is plan() from now on.
  // `epochs_done`: the epochs that this rank has finished, with their evaluation. Like any other
  // call it fails when another rank is lost; call GoOn() again then.
  absl::StatusOr<int> FindPlace(int epochs_done);
  // Returns `status`, whose error, if there is one, is this rank's own.
  absl::Status Own(absl::Status status);
  // Returns true if the last error is this rank's own, rather than one of the group.
  bool failed_locally() const { return failed_locally_; }
  // Returns true if all ranks agreed on that error, so that one of them may report it for all. The
  // group still works.
  bool failed_together() const { return failed_together_; }

  // Notes the end of the run in --sample_log.
  absl::Status EndSampleLog();

  // Returns a sentence if the shares have changed noticeably since the last call (Balance::News()).
  std::string ShareNews();

  // Returns the record of this rank for the report. It and plans() are empty unless the options ask
  // for a report.
  RankRecord Record() const;
  // Returns the memory that this rank holds now.
  RankMemory MemoryHeld() const;
  const std::vector<PlanRecord>& plans() const { return recorder_.plans(); }

  const TrainOptions& options() const { return options_; }
  Communicator& communicator() const { return *comm_; }
  // The first epoch and the first step of the group in this run.
  int first_epoch() const { return first_epoch_; }
  int64_t first_step() const { return first_step_; }
  // FindPlace() changes it.
  const StepPlan& plan() const { return setup_.plan; }
  const Model& model() const { return *setup_.model; }
  const TrainingData& data() const { return *setup_.data; }

 private:
  using OnStep = absl::FunctionRef<absl::Status(const StepFacts&)>;
  class EpochLoop;

  // This rank's part of a step's batch.
  struct Part {
    std::span<const int32_t> samples;
    int64_t place = 0;  // The place of the first one in the batch of all ranks.
  };
  // The results of the passes of a step.
  struct StepResult {
    struct Pass {
      PendingResult result;
      double share = 0;  // Fraction of the rank's samples in the step.
    };
    std::vector<Pass> passes;
  };
  // A step that ended on the host before the device had computed its numbers.
  struct UnreportedStep {
    StepFacts facts;  // `own` is set once the device has computed the loss.
    StepResult result;
    StreamMarks marks;
  };

  TrainingRun(Communicator* comm, const TrainOptions& options, RankSetup setup,
              RunCheckpoints* checkpoints);
  absl::Status Init();
  // Notes in --sample_log that this rank is in its group.
  absl::Status LogGroup();
  // Begins with even shares, unless they are repeated.
  absl::Status MakeBalance();
  // Read the checkpoint before and after the optimizer is created.
  absl::Status FindBeginning();
  absl::Status LoadBeginning();
  absl::Status ShareBuffersOf(int root);
  // Evaluates within an epoch without changing any rank's buffers. `root`: the rank whose buffers
  // are used.
  absl::Status TestInEpoch(int root, const Pauses& pauses);
  TestResult UpdateBest(const Evaluation& test);
  absl::StatusOr<Evaluation> TestWithoutSharing(int64_t most);
  // Returns the prompt and the text generated after it.
  absl::StatusOr<std::string> SampleText();
  // Starts a checkpoint between two steps. `model_rank`: the rank with the buffers of the next
  // step.
  absl::Status Save(int epoch, int64_t steps, int model_rank);
  // Waits for the checkpoint that is being written, and returns its path; empty: none.
  absl::StatusOr<std::string> WaitForSave();
  // Passes a checkpoint whose writing has ended, if there is one, to the function of SetOnSaved().
  void NoteSaved(const std::optional<EndedCheckpoint>& ended, bool goes_on);
  void AskToStop();

  LearningRateSchedule learning_rates() const;
  // Runs `loop`, joined if the options ask for it.
  absl::Status Loop(absl::FunctionRef<absl::Status()> loop);
  absl::Status Freeze(int64_t step);
  // Runs one step of the group: this rank's samples in as many passes as needed, whose gradients
  // are added up.
  absl::StatusOr<StepResult> Step(int64_t step, const Part& mine);
  // Returns this rank's result of a step. Waits for it.
  absl::StatusOr<BatchResult> ResultOf(int64_t step, const StepResult& result);
  // Adds the results of a step, this rank's or those of all ranks, to the numbers of the epoch.
  void AddUp(int64_t step, int epoch, const Evaluation& batch);
  absl::StatusOr<StepResult> Passes(int64_t step, const Part& mine);
  Batch LoadBatch(std::span<const int32_t> samples);
  absl::StatusOr<PendingResult> Pass(int64_t step, std::span<const int32_t> samples,
                                     const PassOptions& how,
                                     absl::FunctionRef<absl::Status(int)> on_gradient);
  // Waits for pending results, and adds them to this rank's numbers of the epoch.
  absl::StatusOr<BatchResult> Note(int64_t step, int epoch, const StepResult& result);
  // Updates the loss scale from the optimizer's check: on a device from that of the step before,
  // for which the host need not wait.
  absl::Status FollowScale();
  std::vector<Joinable*> Joinables() const;
  absl::Status CheckLoss(int64_t step, double loss);
  // On a device: marks the end of a part of the step on the stream.
  absl::Status Mark(SpanKind kind);
  // Reports the earlier steps that the device has finished. The caller has waited for their losses.
  absl::Status ReportPassed(OnStep on_step);
  // Waits for all earlier steps, and reports them.
  absl::Status ReportAll(OnStep on_step);
  absl::Status Report(UnreportedStep step, OnStep on_step);

  Communicator* comm_;
  std::unique_ptr<Communicator> own_comm_;  // Null until a rank is lost.
  // Earlier groups, in which a checkpoint is still being written.
  std::vector<std::unique_ptr<Communicator>> left_comms_;
  const TrainOptions options_;
  RankSetup setup_;
  std::unique_ptr<LossScaler> scaler_;  // Null: losses are not scaled.
  bool last_overflowed_ = false;        // Before this run began.
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Balance> balance_;  // Null: without --balance, or alone.
  std::unique_ptr<StepWatch> watch_;
  std::unique_ptr<StepWatch> pause_;  // Evaluations, samples and checkpoints between two steps.
  std::unique_ptr<StepShare> share_;  // Null unless lost ranks are replaced.
  Evaluation shared_;                 // The results of all ranks in the step that it shared last.

  RunCheckpoints* const checkpoints_;  // Null: none.
  OnSaved on_saved_;                   // May be null.
  bool has_reserved_ = false;          // The memory for copies of checkpoints.
  int first_epoch_ = 0;
  int64_t first_step_ = 0;
  int64_t begin_step_ = 0;    // first_step_, or the step from which the plan goes on after a loss.
  int plan_ranks_ = 0;        // The number of ranks for which the plan was made.
  bool is_newcomer_ = false;  // It has entered, and not found its place yet.
  bool asked_to_stop_ = false;

  bool failed_locally_ = false;
  bool failed_together_ = false;
  int64_t steps_done_ = 0;       // By all ranks, at the last GoOn().
  int64_t step_ = 0;             // Steps of the group until now.
  int64_t saved_step_ = -1;      // The step of the last checkpoint that was started; -1: none.
  bool save_is_left_ = false;    // The one being written was begun in an earlier group.
  BestTest best_;                // Equal on all ranks.
  BestTest before_latest_;       // best_ before the latest evaluation.
  int latest_epoch_ = 0;         // The epoch of the latest evaluation.
  int64_t samples_of_part_ = 0;  // Test samples of an evaluation within an epoch.
  // Results of this rank's batches by epoch, when they were used for training, with share_ those of
  // all ranks; and the numbers before the last batch, which may have to be repeated.
  std::map<int, Evaluation> trained_;
  struct {
    int64_t step = -1;
    int epoch = 0;
    Evaluation before;
  } last_;
  std::unique_ptr<StreamClock> clock_;     // Null: not on a device.
  std::deque<UnreportedStep> unreported_;  // On a device.
  BatchMemory memory_;
  int epoch_ = 0;  // The current one.
  StepRecorder recorder_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_TRAINING_RUN_H_
