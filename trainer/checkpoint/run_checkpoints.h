// A run's checkpoints: the one from which it begins, if any, and those that it writes.
//
//   EK_ASSIGN_OR_RETURN(auto checkpoints,
//                       RunCheckpoints::Open(comm, options.checkpoints, settings, *model));
//   if (const RunState* state = checkpoints->resumed(); state != nullptr) ...  // resume
//   // on all ranks, between two steps; returns when the state is copied
//   if (checkpoints->IsDue(steps, total_steps, requests)) checkpoints->Start(comm, run);
//   // between any two steps: the checkpoint that has ended since, if any
//   if (const auto ended = checkpoints->Poll(); ended.has_value()) ...
//
// A checkpoint is a folder (checkpoint_folder.h):
//
//   model.safetensors            parameters, and the buffers for the next step; --init reads it,
//                                too. The files of Model::companions() are beside it.
//   optimizer/                   zero_optim/checkpoint/checkpoint.h: any optimizer reads it, at any
//                                world size
//   buffers-R-of-N.safetensors   rank R's own buffers (running statistics), where they differ
//   history                      the report's record of the run so far, after SetHistory()
//   state.json                   run_state.h; with checksums of the files above except the
//                                optimizer's, which has its own
//
// Each rank copies its part and writes it in the background, by a CheckpointWriter
// (zero_optim/checkpoint/checkpoint_writer.h). Rank 0 creates the checkpoint, and publishes it when
// everything is on the disk. If a rank fails to write, or has a loss, a weight or a buffer that is
// not finite, all ranks get its error, the unfinished checkpoint is removed, and older ones stay.
//
// When a rank is lost, the save under way is finished if rank 0 has the parts of all ranks, and
// otherwise abandoned; no rank waits for that before it continues. When rank 0 is lost, the rank 0
// of the next group takes the folder over with its next save, also from a process that still runs.
// A newcomer (Communicator::waiting()) opens nothing, and gets the name of the job when it has
// entered.
//
// Resuming:  `auto` uses the newest. A damaged one is an error, which names it and the remedy: no
//            checkpoint is skipped silently. With CheckpointOptions::passes_over_damaged a damaged
//            one is renamed, and the one before it is used: all ranks then first compare the
//            checksums of all files, each rank those of its share.
// Memory:    one copy of the rank's part, kept for the next checkpoint: its optimizer state and
//            buffers, and on one rank the parameters.
// Order:     all ranks call Open() and Start() together. The group outlives a save (is_writing()).
// Threads:   thread-compatible. The arguments of Start() may change once it returns.
// Errors:    the same one on all ranks; the group still works.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

// The data of a run for a checkpoint. `state` is equal on all ranks; Start() fills in its settings,
// files and `trained`.
struct RunToSave {
  RunState state;
  const Model* model = nullptr;
  int model_rank = 0;  // The rank whose buffers are used in the next step.
  Evaluation trained;  // This rank's, in this epoch.
  RankRecord record;   // This rank's, for the history.
  absl::StatusOr<StatePieces> optimizer;
  std::string optimizer_name;
  int64_t optimizer_steps = 0;
  absl::Time begin;  // The time since which the step has waited.
};

// A checkpoint whose writing has ended.
struct EndedCheckpoint {
  int64_t step = 0;
  absl::Status status;  // OK: it is complete.
  std::string path;     // The folder of the complete one.
  // After an error: the newest complete one; -1: none; or why the folder cannot be read.
  absl::StatusOr<int64_t> newest = -1;
  int64_t copied_bytes = 0;  // The bytes that this rank copied.
  absl::Duration stall;      // The time for which this rank's step waited.
  absl::Duration took;       // The time until its writing had ended.
};

class RunCheckpoints {
 public:
  // Called on rank 0 in Start(); its result is called in the background, with the records of all
  // ranks.
  using FinishHistory = std::function<std::string(std::vector<RankRecord> ranks)>;
  using MakeHistory = std::function<FinishHistory()>;

  // On rank 0 `model` gets the weights of the checkpoint, if any; it is unchanged on other ranks.
  static absl::StatusOr<std::unique_ptr<RunCheckpoints>> Open(Communicator& comm,
                                                              const CheckpointOptions& options,
                                                              const RunSettings& settings,
                                                              Model& model);

  // Null: the run is not resumed.
  const RunState* resumed() const { return resumed_.get(); }
  const std::string& resumed_from() const { return chosen_.from; }
  const ResumeTerms& terms() const { return terms_; }
  // Returns, on rank 0, a line about each checkpoint that was passed over.
  const std::vector<std::string>& passed_over() const { return passed_over_; }
  // Returns true if checkpoints are written.
  bool has_folder() const { return !options_.folder.empty(); }
  // Returns the bytes of the memory for copies, which is taken by the first save and kept.
  int64_t copy_bytes() const { return writer_.copy_bytes(); }
  const RunSettings& settings() const { return settings_; }
  // Identifies this run for the next rank 0; a newcomer's is set before its first Start().
  const std::string& job() const { return chosen_.job; }
  void SetJob(const std::string& job) { chosen_.job = job; }
  // The history in that checkpoint; empty: none; an error if it cannot be read.
  const absl::StatusOr<std::string>& history() const { return history_; }
  void SetHistory(MakeHistory make) { make_history_ = std::move(make); }
  std::string OptimizerFolder() const { return chosen_.from + "/optimizer"; }
  // Loads this rank's own buffers, as they were after the last step. All ranks of an exact resume
  // call it.
  absl::Status LoadBuffers(int rank, Model& model) const;

  // Adds the remedy to an error of reading the checkpoint.
  absl::Status Explain(const absl::Status& status) const;

  // Returns true if a checkpoint is due after `steps` steps, in the last of which the ranks asked
  // for `requests`.
  bool IsDue(int64_t steps, int64_t total_steps, uint32_t requests) const;
  // Takes the memory for the copies of the first checkpoint in the background, for a model on the
  // host. `has_model`: this rank will write the model's file.
  void Reserve(const Model& model, bool has_model, const absl::StatusOr<StatePieces>& optimizer);
  // Waits for the previous checkpoint, and copies this rank's part, which a thread then writes.
  void Start(Communicator& comm, RunToSave to_save);
  // Returns the checkpoint that Start() began, once, when its writing has ended. Poll() does not
  // wait for that; Wait() does, and returns DeadlineExceeded in it if the writing goes on after
  // `timeout`. Both return null if there is no such checkpoint.
  bool is_writing() const { return writing_ != nullptr; }
  std::optional<EndedCheckpoint> Poll();
  std::optional<EndedCheckpoint> Wait(absl::Duration timeout);

 private:
  RunCheckpoints(const CheckpointOptions& options, const RunSettings& settings)
      : options_(options), settings_(settings) {}

  // The data that the thread of a checkpoint uses.
  struct Writing;
  struct Damaged {
    int64_t step = 0;
    absl::Status why;
  };
  // The choice of rank 0, which it sends to all ranks.
  struct Chosen {
    std::string from;    // The checkpoint to resume from; empty: none, and no state.
    std::string state;   // Its state.json.
    std::string advice;  // How to continue without it if it cannot be read.
    std::string job;     // Identifies the next rank 0; empty while the folder has no writer.

    static void VisitFields(auto& self, auto& visit) {
      visit(self.from, self.state, self.advice, self.job);
    }
  };

  // Called on rank 0.
  absl::Status OpenFolder();
  // Chooses the checkpoint to resume from, loads its weights, and sets chosen_. `damage`: the error
  // of the checkpoint that was chosen before.
  absl::Status Choose(const absl::Status& damage, Model& model);
  absl::StatusOr<std::string> ChooseResume() const;  // Empty: none.
  absl::Status NoteDamaged(const absl::Status& why);
  absl::Status SetDamagedAside();
  std::string AdviceFor(const std::string& path) const;
  absl::Status LoadWeights(const std::string& path, const RunState& state, Model& model) const;
  bool passes_over() const {
    return options_.passes_over_damaged && options_.resume == kResumeAuto;
  }
  // Returns the first rank's damage in its share of the checkpoint's files; OK: none. Fails if a
  // rank cannot read its share.
  absl::StatusOr<absl::Status> DamageOfShares(Communicator& comm, absl::string_view flag) const;
  // Reads this rank's share of the checkpoint's files.
  absl::Status CheckShare(const Communicator& comm) const;

  absl::StatusOr<std::string> Begin(int64_t step);
  absl::Status Publish(Writing& writing, const std::vector<std::string>& parts);

  const CheckpointOptions options_;
  const RunSettings settings_;
  std::unique_ptr<CheckpointFolder> folder_;  // On rank 0.
  Chosen chosen_;
  std::unique_ptr<RunState> resumed_;
  ResumeTerms terms_;
  absl::StatusOr<std::string> history_ = "";
  MakeHistory make_history_;      // Null: no history.
  std::vector<Damaged> damaged_;  // On rank 0: newest first.
  std::vector<std::string> passed_over_;
  std::map<std::string, std::string> companions_;  // The model's files.
  std::shared_ptr<Writing> writing_;               // Null: none, or returned.
  CheckpointWriter writer_;                        // Last: its thread uses the rest.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_
