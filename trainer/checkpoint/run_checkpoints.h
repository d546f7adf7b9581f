// A run's checkpoints: the one that it begins with, if there is one, and those that it writes.
//
//   EK_ASSIGN_OR_RETURN(auto checkpoints, RunCheckpoints::Open(comm, options.checkpoints, settings, *model));
//   if (const RunState* state = checkpoints->resumed(); state != nullptr) ...       // go on from there
//   if (checkpoints->IsDue(steps, total_steps, answer.requests)) {
//     EK_ASSIGN_OR_RETURN(const std::string path, checkpoints->Save(comm, run));      // on all ranks, after that step
//   }
//
// A checkpoint is a folder (checkpoint_folder.h):
//
//   model.safetensors            parameters, and the buffers that the next step begins with; --init reads it, too
//   optimizer/                   zero_optim/checkpoint.h: any optimizer reads it, at any world size
//   buffers-R-of-N.safetensors   rank R's own buffers (running statistics), where there are others
//   history                      what the report says of the run so far, where SetHistory() was called
//   state.json                   run_state.h; it has checksums of the files above but the optimizer's, which has its
//                                own
//
// Each rank writes what it has. Rank 0 begins it, and publishes it when everything is on the disk. If one can't write,
// all get its error, what was written is removed, and older checkpoints stay. When rank 0 is lost, the rank 0 of the
// group that goes on takes the folder over, also from a process that still runs.
//
// Resuming:  `auto` takes the newest. One that is damaged is an error that names it and says what to do: nothing is
//            passed over in silence.
// Order:     Open() and Save() are calls of all ranks together.
// Threads:   thread-compatible.
// Errors:    on all ranks the same one; the group goes on.

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
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {

// What a run gives to be saved. `state` is equal on all ranks; its settings, files and `trained` are filled in.
struct RunToSave {
  RunState state;
  const Model* model = nullptr;
  int model_rank = 0;  // Whose buffers the next step begins with.
  Evaluation trained;  // Of this rank, in this epoch.
  std::vector<RankRecord> ranks;  // On rank 0, for the history.
  StatePieces optimizer;
  std::string optimizer_name;
  int64_t optimizer_steps = 0;
};

class RunCheckpoints {
 public:
  // Called on rank 0 with RunToSave::ranks.
  using MakeHistory = std::function<std::string(std::vector<RankRecord> ranks)>;

  // On rank 0 `model` becomes the checkpoint's, if there is one; the other ranks' is left alone.
  static absl::StatusOr<std::unique_ptr<RunCheckpoints>> Open(Communicator& comm, const CheckpointOptions& options,
                                                              const RunSettings& settings, Model& model);

  // Null: the run begins at its beginning.
  const RunState* resumed() const { return resumed_.get(); }
  const std::string& resumed_from() const { return resumed_from_; }
  const ResumeTerms& terms() const { return terms_; }
  // That checkpoint's; empty: it has none.
  const std::string& history() const { return history_; }
  void SetHistory(MakeHistory make) { make_history_ = std::move(make); }
  std::string OptimizerFolder() const { return resumed_from_ + "/optimizer"; }
  // This rank's own buffers, as they were after the last step. On all ranks of an exact resume.
  absl::Status LoadBuffers(int rank, Model& model) const;

  // An error of reading it, with what one can do about it.
  absl::Status Explain(const absl::Status& status) const;

  // Whether one is to be written after so many steps, in the last of which the ranks asked for `requests`.
  bool IsDue(int64_t steps, int64_t total_steps, uint32_t requests) const;
  // The new checkpoint's path.
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
  std::string job_;                           // By which the folder knows the next rank 0. Empty: it has no writer yet.
  std::unique_ptr<RunState> resumed_;
  std::string resumed_from_;
  std::string advice_;  // For whoever can't read it.
  ResumeTerms terms_;
  std::string history_;
  MakeHistory make_history_;  // Null: there is no history.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_CHECKPOINTS_H_
