#include "evenkeel/trainer/checkpoint/folder_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {
namespace {

using internal::UniqueFd;

constexpr absl::Duration kLook = absl::Milliseconds(20);  // Between two attempts to lock.
constexpr size_t kLongestJob = 64;

absl::Status IsAnothers(const std::string& path) {
  const std::string folder = path.substr(0, path.rfind('/'));
  return absl::FailedPreconditionError(
      absl::StrCat("another job is writing its checkpoints to ", folder,
                   "; wait until it ends, or choose another folder"));
}

absl::StatusOr<UniqueFd> Open(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file) return ErrnoStatus("cannot open", path);
  return file;
}

// Returns false if another process has the lock.
absl::StatusOr<bool> TryLock(const UniqueFd& file, const std::string& path) {
  while (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno != EINTR) return ErrnoStatus("cannot lock", path);
  }
  return true;
}

std::string ReadJob(const UniqueFd& file) {
  char text[kLongestJob];
  const ssize_t size = pread(file.get(), text, sizeof(text), 0);
  return {text, size > 0 ? static_cast<size_t>(size) : 0};
}

absl::Status WriteJob(const UniqueFd& file, const std::string& path, absl::string_view job) {
  errno = 0;
  const bool is_written =
      ftruncate(file.get(), 0) == 0 &&
      pwrite(file.get(), job.data(), job.size(), 0) == static_cast<ssize_t>(job.size());
  if (is_written) return absl::OkStatus();
  if (errno == 0) errno = EIO;  // A short write does not set it.
  return ErrnoStatus("cannot write", path);
}

// Returns true unless another file has replaced it.
bool IsAt(const std::string& path, const UniqueFd& file) {
  struct stat own, named;
  return fstat(file.get(), &own) == 0 && stat(path.c_str(), &named) == 0 &&
         own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

// Replaces the file `given_up` at `path` by a locked one.
absl::StatusOr<UniqueFd> Succeed(const UniqueFd& given_up, const std::string& path,
                                 absl::string_view job) {
  // A unique name: an earlier successor may have left its file, or may still exist.
  const std::string temporary =
      absl::StrCat(path, ".", getpid(), "-", absl::Hex(std::random_device()()));
  EK_ASSIGN_OR_RETURN(UniqueFd file, Open(temporary));
  absl::Status status = TryLock(file, temporary).status();
  if (status.ok()) status = WriteJob(file, temporary, job);
  // If the process that was given up has ended, no other job gets the lock that it left.
  if (status.ok()) status = TryLock(given_up, path).status();
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0)
    status = ErrnoStatus("cannot rename to", path);
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  // It ended at this moment, and a process of another job got the lock after all.
  if (ReadJob(given_up) != job) return IsAnothers(path);
  return file;
}

}  // namespace

absl::StatusOr<UniqueFd> LockFolder(const std::string& folder, absl::string_view job,
                                    absl::Duration patience) {
  const std::string path = absl::StrCat(folder, "/.lock");
  const absl::Time deadline = SteadyNow() + patience;
  while (true) {
    EK_ASSIGN_OR_RETURN(UniqueFd file, Open(path));
    EK_ASSIGN_OR_RETURN(const bool is_taken, TryLock(file, path));
    if (is_taken) {
      // The name is written before the path is checked; Succeed() changes the path before it reads
      // the name. So if both happen at once, at least one of the two processes sees the other.
      EK_RETURN_IF_ERROR(WriteJob(file, path, job));
      if (IsAt(path, file)) return file;
      continue;
    }
    if (ReadJob(file) == job) return Succeed(file, path, job);
    if (SteadyNow() >= deadline) return IsAnothers(path);
    absl::SleepFor(kLook);
  }
}

}  // namespace evenkeel
