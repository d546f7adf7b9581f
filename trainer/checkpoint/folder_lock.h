// Lets one process of one job at a time write to a folder.
//
//   EK_ASSIGN_OR_RETURN(const auto lock,
//                       FolderLock::Take("checkpoints", job, /*patience=*/absl::Seconds(5)));
//
// The lock is on the file `.lock` in the folder, with the job's name in it, and ends with the
// process in any case. Take() waits `patience` for a process of another job. From a process of its
// own job it takes the lock at once, by replacing the file: the caller has found that its job has
// given up that process, which may be stopped or disconnected from the others, and may continue
// later. The lock cannot keep such a process from writing; the caller's use of the folder must.
//
// Threads: thread-compatible.
// Errors:  FailedPrecondition if another job's process has the lock; the file system's own, with
//          the path.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_FOLDER_LOCK_H_
#define EVENKEEL_TRAINER_CHECKPOINT_FOLDER_LOCK_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

class FolderLock {
 public:
  static constexpr absl::string_view kFile = ".lock";
  // Prefix of the names of files that replace it. A killed process may leave one.
  static constexpr absl::string_view kTemporary = ".lock.";

  // `job` is a unique name of at most 64 bytes.
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(const std::string& folder,
                                                          absl::string_view job,
                                                          absl::Duration patience);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  static absl::StatusOr<std::unique_ptr<FolderLock>> Open(const std::string& path);
  static absl::StatusOr<std::unique_ptr<FolderLock>> Succeed(const FolderLock& given_up,
                                                             absl::string_view job);

  FolderLock(std::string path, int descriptor);
  absl::StatusOr<bool> TryLock() const;  // False: another process has it.
  std::string ReadJob() const;
  absl::Status WriteJob(absl::string_view job) const;
  bool IsAtItsPath() const;  // True unless another file has replaced it.

  std::string path_;
  const int descriptor_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_FOLDER_LOCK_H_
