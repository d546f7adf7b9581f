// The folder in which a run keeps its checkpoints, each a folder of its own: step-000000120.
//
//   EK_ASSIGN_OR_RETURN(auto folder, CheckpointFolder::Open("checkpoints"));        // on one process of the job
//   EK_ASSIGN_OR_RETURN(const std::string path, folder->Begin(/*step=*/120));
//   ... all ranks write files below `path` and flush them ...
//   EK_RETURN_IF_ERROR(folder->Publish(/*keep=*/3));
//
// A checkpoint is complete or absent: it is written under another name (.saving-step-...) and renamed, and it is
// renamed (.removing-...) before it is removed. What a killed process has left of either, or of a lock, is removed by
// the next Open().
//
// One process of one job writes there at a time (folder_lock.h).
//
// A process that its job has given up may still be there, and go on later: it was stopped, or cut off. Its successor
// opens the folder with the job's name and need not wait for it. What that process has begun is renamed before it is
// removed, and each process begins checkpoints under names of its own. So wherever it goes on, it publishes a
// checkpoint that was complete before its successor came, or none.
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path; FailedPrecondition if another process has the lock.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_FOLDER_H_
#define EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/checkpoint/folder_lock.h"

namespace evenkeel {

struct FoundCheckpoint {
  int64_t step = 0;
  std::string path;
  friend bool operator==(const FoundCheckpoint&, const FoundCheckpoint&) = default;
};

// Those in `folder` by step; none if that is not there.
absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(const std::string& folder);

struct CheckpointFolderOptions {
  // The job() of the process that this one succeeds. Empty: the job begins, and gets a name.
  std::string job;
  absl::Duration patience = absl::Seconds(5);  // For another job's lock.
};

class CheckpointFolder {
 public:
  // Makes the folder if it is not there.
  static absl::StatusOr<std::unique_ptr<CheckpointFolder>> Open(const std::string& path,
                                                                const CheckpointFolderOptions& options = {});
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::string& path() const { return path_; }
  const std::string& job() const { return job_; }

  // An empty folder for the checkpoint of that step.
  absl::StatusOr<std::string> Begin(int64_t step);
  // Everything is in it: gives it its name, and removes the oldest checkpoints but `keep` (0: none). Its new path.
  absl::StatusOr<std::string> Publish(int keep);
  // Removes what Begin() made; nothing if it is not there any more.
  void Discard();

 private:
  CheckpointFolder(std::string path, std::string job, std::unique_ptr<FolderLock> lock);
  absl::Status RemoveLeftovers();
  absl::Status Prune(int keep);

  const std::string path_;
  const std::string job_;
  const std::string own_;  // In the names of what this process has begun, and no other one.
  const std::unique_ptr<FolderLock> lock_;
  int64_t step_ = -1;   // The last Begin()'s.
  std::string saving_;  // Its folder; empty: there was none.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_FOLDER_H_
