#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kPrefix = "step-";
constexpr absl::string_view kSaving = ".saving-";
constexpr absl::string_view kRemoving = ".removing-";
constexpr absl::Duration kLook = absl::Milliseconds(20);  // Between two looks at a lock.

std::string NameOf(int64_t step) { return absl::StrFormat("%s%09d", kPrefix, step); }

std::string Below(const std::string& folder, absl::string_view prefix, int64_t step) {
  return absl::StrCat(folder, "/", prefix, NameOf(step));
}

absl::Status StatusOf(const std::error_code& error, absl::string_view action, const std::string& path) {
  if (!error) return absl::OkStatus();
  return absl::ErrnoToStatus(error.value(), absl::StrCat(action, " ", path));
}

absl::Status ErrnoStatus(absl::string_view action, const std::string& path) {
  return StatusOf(std::error_code(errno, std::generic_category()), action, path);
}

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator at(folder, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) names.push_back(at->path().filename());
  EK_RETURN_IF_ERROR(StatusOf(error, "cannot read the folder", folder));
  return names;
}

absl::Status Remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return StatusOf(error, "cannot remove", path);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  return rename(from.c_str(), to.c_str()) == 0 ? absl::OkStatus()
                                               : ErrnoStatus(absl::StrCat("cannot rename ", from, " to"), to);
}

// Without this a rename may be lost when the machine stops.
absl::Status Flush(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY);
  if (descriptor < 0) return ErrnoStatus("cannot open", folder);
  // Some file systems cannot flush a folder, and need not.
  const bool failed = fsync(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP;
  const absl::Status status = failed ? ErrnoStatus("cannot flush", folder) : absl::OkStatus();
  close(descriptor);
  return status;
}

}  // namespace

absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(const std::string& folder) {
  std::vector<FoundCheckpoint> found;
  std::error_code error;
  if (!fs::exists(folder, error) && !error) return found;
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  for (const std::string& name : names) {
    absl::string_view digits = name;
    int64_t step = 0;
    if (!absl::ConsumePrefix(&digits, kPrefix) || digits.empty() ||
        !std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit) || !absl::SimpleAtoi(digits, &step)) {
      continue;
    }
    found.push_back({.step = step, .path = absl::StrCat(folder, "/", name)});
  }
  std::ranges::sort(found, {}, &FoundCheckpoint::step);
  return found;
}

absl::StatusOr<std::unique_ptr<CheckpointFolder>> CheckpointFolder::Open(const std::string& path,
                                                                         absl::Duration patience) {
  std::error_code error;
  fs::create_directories(path, error);
  EK_RETURN_IF_ERROR(StatusOf(error, "cannot make the folder", path));
  const std::string lock_path = path + "/.lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock < 0) return ErrnoStatus("cannot open", lock_path);
  std::unique_ptr<CheckpointFolder> folder(new CheckpointFolder(path, lock));
  const absl::Time deadline = absl::Now() + patience;
  while (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return ErrnoStatus("cannot lock", lock_path);
    if (absl::Now() >= deadline) {
      return absl::FailedPreconditionError(
          absl::StrCat("another job writes its checkpoints to ", path, ": wait for its end, or choose another folder"));
    }
    absl::SleepFor(kLook);
  }
  EK_RETURN_IF_ERROR(folder->RemoveLeftovers());
  return folder;
}

CheckpointFolder::~CheckpointFolder() { close(lock_); }

absl::Status CheckpointFolder::RemoveLeftovers() {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(path_));
  for (const std::string& name : names) {
    if (!absl::StartsWith(name, kSaving) && !absl::StartsWith(name, kRemoving)) continue;
    EK_RETURN_IF_ERROR(Remove(absl::StrCat(path_, "/", name)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointFolder::Begin(int64_t step) {
  Discard();
  step_ = step;
  const std::string path = Below(path_, kSaving, step);
  std::error_code error;
  fs::create_directory(path, error);
  EK_RETURN_IF_ERROR(StatusOf(error, "cannot make the folder", path));
  return path;
}

absl::StatusOr<std::string> CheckpointFolder::Publish(int keep) {
  const std::string path = Below(path_, "", step_);
  EK_RETURN_IF_ERROR(Flush(Below(path_, kSaving, step_)));
  EK_RETURN_IF_ERROR(Rename(Below(path_, kSaving, step_), path));
  EK_RETURN_IF_ERROR(Flush(path_));
  EK_RETURN_IF_ERROR(Prune(keep));
  return path;
}

absl::Status CheckpointFolder::Prune(int keep) {
  EK_ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, FindCheckpoints(path_));
  const size_t surplus = keep == 0 || found.size() <= static_cast<size_t>(keep) ? 0 : found.size() - keep;
  for (size_t i = 0; i < surplus; ++i) {
    const std::string removing = Below(path_, kRemoving, found[i].step);
    EK_RETURN_IF_ERROR(Rename(found[i].path, removing));
    EK_RETURN_IF_ERROR(Remove(removing));
  }
  return absl::OkStatus();
}

void CheckpointFolder::Discard() {
  if (step_ >= 0) Remove(Below(path_, kSaving, step_)).IgnoreError();
}

}  // namespace evenkeel
