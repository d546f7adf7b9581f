// The folder of the checkpoints of a run, each of which is a subfolder: step-000000120.
//
//   // on one process of the job
//   EK_ASSIGN_OR_RETURN(auto folder, CheckpointFolder::Open("checkpoints"));
//   EK_ASSIGN_OR_RETURN(const std::string path, folder->Begin(/*step=*/120));
//   ... all ranks write files below `path` and flush them ...
//   EK_RETURN_IF_ERROR(folder->Publish(/*keep=*/3));
//
// A checkpoint is complete or absent: it is written under another name (.saving-step-...) and
// renamed, and it is renamed (.removing-...) before it is removed. The next Open() removes what a
// killed process has left of either, or of a lock. A checkpoint that does not load is kept under a
// third name (damaged-step-...).
//
// One process of one job writes to the folder at a time (folder_lock.h).
//
// A process that its job has given up may still exist and continue later: it was stopped or
// disconnected. Its successor opens the folder with the job's name without waiting for it. The
// unfinished checkpoints of that process are renamed before they are removed, and each attempt at a
// checkpoint has a name of its own. So a process that continues publishes a checkpoint that was
// complete before its successor opened the folder, or none, and adds no file to another attempt at
// the same step.
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path; FailedPrecondition if another process has the
//          lock.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_FOLDER_H_
#define EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel {

struct FoundCheckpoint {
  int64_t step = 0;
  std::string path;
  friend bool operator==(const FoundCheckpoint&, const FoundCheckpoint&) = default;
};

// Returns the checkpoints in `folder` by step; none if the folder does not exist.
absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(const std::string& folder);

// Returns the file with a model's weights for a path: the file itself, model.safetensors in a
// folder, or that of the newest checkpoint in a folder of checkpoints. NotFound with the path and
// the files it lacks.
absl::StatusOr<std::string> FindWeights(const std::string& path);

// Returns the path of the complete checkpoint of `step`.
std::string CheckpointPath(const std::string& folder, int64_t step);

inline constexpr char kResumeAuto[] = "auto";
inline constexpr char kResumeNever[] = "never";

// When a run writes checkpoints, and from which one it begins.
struct CheckpointOptions {
  std::string folder;  // For all checkpoints, seen by all ranks; empty: none are written.
  int64_t every = 0;   // Steps; 0: only when the run is stopped, and at its end.
  int keep = 3;        // Number of the newest checkpoints to keep; 0: all.
  // kResumeAuto: the newest in `folder`, if any; kResumeNever: none, `folder` must not contain any;
  // else the path of a checkpoint.
  std::string resume = kResumeAuto;
  // With kResumeAuto: a checkpoint that does not load is passed over for the one before it. For
  // restarted jobs, whose user may be absent.
  bool passes_over_damaged = false;

  bool resumes_from_path() const { return resume != kResumeAuto && resume != kResumeNever; }
};

struct CheckpointFolderOptions {
  // The job() of the process that this one succeeds. Empty: a new job, which gets a name.
  std::string job;
  absl::Duration patience = absl::Seconds(5);  // For the lock of another job.
};

class CheckpointFolder {
 public:
  // Opens the folder, and creates it if it does not exist.
  static absl::StatusOr<std::unique_ptr<CheckpointFolder>> Open(
      const std::string& path, const CheckpointFolderOptions& options = {});
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::string& job() const { return job_; }
  // Returns the path that Begin() returned last.
  const std::string& saving() const { return saving_; }

  // Returns the path of an empty folder for the checkpoint of `step`.
  absl::StatusOr<std::string> Begin(int64_t step);
  // Renames the complete checkpoint to its final name, removes the oldest ones except `keep` (0:
  // removes none), and returns its path. A complete one of that step, which another process of the
  // job has published, stays in its place.
  absl::StatusOr<std::string> Publish(int keep);
  // Removes the folder of Begin() if it still exists.
  void Discard();
  // Renames the checkpoint of `step`, which does not load, so that FindCheckpoints() does not
  // return it; returns its new path. Replaces an earlier one of that step.
  absl::StatusOr<std::string> SetAside(int64_t step);

 private:
  CheckpointFolder(std::string path, std::string job, internal::UniqueFd lock);
  absl::Status RemoveLeftovers();
  absl::Status Prune(int keep);

  const std::string path_;
  const std::string job_;
  const std::string own_;  // Unique part of the names of unfinished checkpoints of this process.
  const internal::UniqueFd lock_;
  int attempts_ = 0;    // Calls of Begin().
  int64_t step_ = -1;   // The step of the last Begin().
  std::string saving_;  // Its folder; empty: Begin() was not called.
  int removed_ = 0;     // Numbers the folders that are being removed.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_FOLDER_H_
