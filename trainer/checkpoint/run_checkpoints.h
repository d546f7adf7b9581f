// A run's checkpoints: the one from which it begins, if any, and those that it writes.
//
//   EK_ASSIGN_OR_RETURN(auto checkpoints,
//                       RunCheckpoints::Open(comm, options.checkpoints, settings, *model));
//   if (const RunState* state = checkpoints->resumed(); state != nullptr) ...  // resume
//   if (checkpoints->IsDue(steps, total_steps, answer.requests)) {
//     // on all ranks, after that step
//     EK_ASSIGN_OR_RETURN(const std::string path, checkpoints->Save(comm, run));
//   }
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
// Each rank writes its part. Rank 0 creates the checkpoint, and publishes it when everything is on
// the disk. If a rank fails to write, all ranks get its error, the unfinished checkpoint is
// removed, and older ones stay. When rank 0 is lost, the rank 0 of the remaining group takes the
// folder over, also from a process that still runs.
//
// Resuming:  `auto` uses the newest. A damaged one is an error, which names it and the remedy: no
//            checkpoint is skipped silently.
// Order:     all ranks call Open() and Save() together.
// Threads:   thread-compatible.
// Errors:    the same one on all ranks; the group still works.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/checkpoint/checkpoint_options.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

// The data of a run for a checkpoint. `state` is equal on all ranks; Save() fills in its settings,
// files and `trained`.
struct RunToSave {
  RunState state;
  const Model* model = nullptr;
  int model_rank = 0;             // The rank whose buffers are used in the next step.
  Evaluation trained;             // This rank's, in this epoch.
  std::vector<RankRecord> ranks;  // On rank 0, for the history.
  StatePieces optimizer;
  std::string optimizer_name;
  int64_t optimizer_steps = 0;
};

class RunCheckpoints {
 public:
  // Called on rank 0 with RunToSave::ranks.
  using MakeHistory = std::function<std::string(std::vector<RankRecord> ranks)>;

  // On rank 0 `model` gets the weights of the checkpoint, if any; it is unchanged on other ranks.
  static absl::StatusOr<std::unique_ptr<RunCheckpoints>> Open(Communicator& comm,
                                                              const CheckpointOptions& options,
                                                              const RunSettings& settings,
                                                              Model& model);

  // Null: the run is not resumed.
  const RunState* resumed() const { return resumed_.get(); }
  const std::string& resumed_from() const { return resumed_from_; }
  const ResumeTerms& terms() const { return terms_; }
  // Returns true if checkpoints are written.
  bool has_folder() const { return !options_.folder.empty(); }
  const RunSettings& settings() const { return settings_; }
  // The history in that checkpoint; empty: none.
  const std::string& history() const { return history_; }
  void SetHistory(MakeHistory make) { make_history_ = std::move(make); }
  std::string OptimizerFolder() const { return resumed_from_ + "/optimizer"; }
  // Loads this rank's own buffers, as they were after the last step. All ranks of an exact resume
  // call it.
  absl::Status LoadBuffers(int rank, Model& model) const;

  // Adds the remedy to an error of reading the checkpoint.
  absl::Status Explain(const absl::Status& status) const;

  // Returns true if a checkpoint is due after `steps` steps, in the last of which the ranks asked
  // for `requests`.
  bool IsDue(int64_t steps, int64_t total_steps, uint32_t requests) const;
  // Writes a checkpoint and returns its path.
  absl::StatusOr<std::string> Save(Communicator& comm, RunToSave run);

 private:
  RunCheckpoints(const CheckpointOptions& options, const RunSettings& settings)
      : options_(options), settings_(settings) {}

  // On rank 0.
  absl::Status OpenFolder();
  absl::StatusOr<std::string> ChooseResume() const;  // Empty: none.
  std::string AdviceFor(const std::string& path) const;
  absl::StatusOr<std::string> ReadResumed(const std::string& path, Model& model) const;
  absl::StatusOr<std::string> Begin(int64_t step);
  absl::StatusOr<std::string> Finish(const std::string& path, RunToSave& run);

  absl::Status WriteParts(Communicator& comm, const std::string& path, RunToSave& run) const;
  absl::Status WriteOwn(Communicator& comm, const std::string& path, const RunToSave& run,
                        std::map<std::string, FileSums>& files) const;

  const CheckpointOptions options_;
  const RunSettings settings_;
  std::unique_ptr<CheckpointFolder> folder_;  // On rank 0.
  std::string
      job_;  // Identifies the next rank 0 to the folder. Empty: the folder has no writer yet.
  std::unique_ptr<RunState> resumed_;
  std::string resumed_from_;
  std::string advice_;  // How to continue without a checkpoint that cannot be read.
  ResumeTerms terms_;
  std::string history_;
  MakeHistory make_history_;  // Null: no history.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_
