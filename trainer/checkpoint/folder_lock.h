// Lets one process of one job at a time write to a folder.
//
//   EK_ASSIGN_OR_RETURN(const internal::UniqueFd lock,
//                       LockFolder("checkpoints", job, /*patience=*/absl::Seconds(5)));
//
// The lock is on the file `.lock` in the folder, with the job's name in it. It lasts as long as the
// descriptor, and ends with the process in any case. LockFolder() waits `patience` for a process of
// another job. From a process of its own job it takes the lock at once, by replacing the file: the
// caller has found that its job has given up that process, which may be stopped or disconnected
// from the others, and may continue later. The lock cannot keep such a process from writing; the
// caller's use of the folder must.
//
// Threads: safe from any thread.
// Errors:  FailedPrecondition if another job's process has the lock; the file system's own, with
//          the path.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_FOLDER_LOCK_H_
#define EVENKEEL_TRAINER_CHECKPOINT_FOLDER_LOCK_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel {

// Prefix of the names of files that replace the lock's. A killed process may leave one.
inline constexpr absl::string_view kTemporaryLock = ".lock.";

// `job` is a unique name of at most 64 bytes.
absl::StatusOr<internal::UniqueFd> LockFolder(const std::string& folder, absl::string_view job,
                                              absl::Duration patience);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_FOLDER_LOCK_H_
