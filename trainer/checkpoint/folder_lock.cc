#include "evenkeel/trainer/checkpoint/folder_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

namespace evenkeel {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);  // Between two attempts to lock.
constexpr size_t kLongestJob = 64;

absl::Status IsAnothers(const std::string& path) {
  const std::string folder = path.substr(0, path.rfind('/'));
  return absl::FailedPreconditionError(
      absl::StrCat("another job is writing its checkpoints to ", folder,
                   "; wait until it ends, or choose another folder"));
}

}  // namespace

FolderLock::FolderLock(std::string path, int descriptor)
    : path_(std::move(path)), descriptor_(descriptor) {}

FolderLock::~FolderLock() { close(descriptor_); }

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Open(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) return ErrnoStatus("cannot open", path);
  return std::unique_ptr<FolderLock>(new FolderLock(path, descriptor));
}

absl::StatusOr<bool> FolderLock::TryLock() const {
  while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno != EINTR) return ErrnoStatus("cannot lock", path_);
  }
  return true;
}

std::string FolderLock::ReadJob() const {
  char text[kLongestJob];
  const ssize_t size = pread(descriptor_, text, sizeof(text), 0);
  return {text, size > 0 ? static_cast<size_t>(size) : 0};
}

absl::Status FolderLock::WriteJob(absl::string_view job) const {
  errno = 0;
  const bool is_written =
      ftruncate(descriptor_, 0) == 0 &&
      pwrite(descriptor_, job.data(), job.size(), 0) == static_cast<ssize_t>(job.size());
  if (is_written) return absl::OkStatus();
  if (errno == 0) errno = EIO;  // A short write does not set it.
  return ErrnoStatus("cannot write", path_);
}

bool FolderLock::IsAtItsPath() const {
  struct stat own, named;
  return fstat(descriptor_, &own) == 0 && stat(path_.c_str(), &named) == 0 &&
         own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Take(const std::string& folder,
                                                             absl::string_view job,
                                                             absl::Duration patience) {
  const absl::Time deadline = SteadyNow() + patience;
  while (true) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<FolderLock> lock, Open(absl::StrCat(folder, "/", kFile)));
    EK_ASSIGN_OR_RETURN(const bool is_taken, lock->TryLock());
    if (is_taken) {
      // The name is written before the path is checked; Succeed() changes the path before it reads
      // the name. So if both happen at once, at least one of the two processes sees the other.
      EK_RETURN_IF_ERROR(lock->WriteJob(job));
      if (lock->IsAtItsPath()) return lock;
      continue;
    }
    if (lock->ReadJob() == job) return Succeed(*lock, job);
    if (SteadyNow() >= deadline) return IsAnothers(lock->path_);
    absl::SleepFor(kLook);
  }
}

// Replaces the file of `given_up` by a locked one.
absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Succeed(const FolderLock& given_up,
                                                                absl::string_view job) {
  const std::string& path = given_up.path_;
  // A unique name: an earlier successor may have left its file, or may still exist.
  const std::string temporary =
      absl::StrCat(path, ".", getpid(), "-", absl::Hex(std::random_device()()));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<FolderLock> lock, Open(temporary));
  absl::Status status = lock->TryLock().status();
  if (status.ok()) status = lock->WriteJob(job);
  // If the process that was given up has ended, no other job gets the lock that it left.
  if (status.ok()) status = given_up.TryLock().status();
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0)
    status = ErrnoStatus("cannot rename to", path);
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  lock->path_ = path;
  // It ended at this moment, and a process of another job got the lock after all.
  if (given_up.ReadJob() != job) return IsAnothers(path);
  return lock;
}

}  // namespace evenkeel
