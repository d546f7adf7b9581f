#include "evenkeel/comm/rendezvous/file_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/read_file.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/control/key_value.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using internal::FileError;
using internal::Links;
using internal::ReadFile;
using internal::UniqueFd;

constexpr size_t kMaxFileName = 250;
constexpr absl::Duration kLockTimeout = absl::Seconds(30);

// Returns the path of a value. Its name is safe: all but letters, digits, '-' and '_' become two
// hexadecimal digits.
absl::StatusOr<std::string> PathOf(const std::string& folder, absl::string_view key) {
  EK_RETURN_IF_ERROR(internal::CheckKey(key));
  constexpr char kHex[] = "0123456789abcdef";
  std::string name = "v.";
  for (const unsigned char c : key) {
    if (absl::ascii_isalnum(c) || c == '-' || c == '_') {
      name.push_back(static_cast<char>(c));
    } else {
      name += {'%', kHex[c >> 4], kHex[c & 15]};
    }
  }
  if (name.size() > kMaxFileName) {
    return absl::InvalidArgumentError(
        absl::StrCat("the key \"", key, "\" is too long for a file store"));
  }
  return absl::StrCat(folder, "/", name);
}

absl::Status WriteNewFile(const std::string& path, absl::string_view content) {
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return FileError(path);
  const bool is_written = internal::WriteAll(fd.get(), content) && fsync(fd.get()) == 0;
  return is_written ? absl::OkStatus() : FileError(path);
}

// A complete file under a temporary name, which contains the process and the host, so that it is
// unique.
class Draft {
 public:
  static absl::StatusOr<Draft> Write(const std::string& folder, absl::string_view content) {
    static std::atomic<int> count = 0;
    char host[256] = {};
    gethostname(host, sizeof(host) - 1);
    Draft draft(absl::StrCat(folder, "/draft.", host, ".", getpid(), ".", count++));
    EK_RETURN_IF_ERROR(WriteNewFile(draft.path_, content));
    return draft;
  }
  Draft(Draft&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  ~Draft() {
    if (!path_.empty()) unlink(path_.c_str());
  }

  absl::Status Replace(const std::string& place) const {
    return rename(path_.c_str(), place.c_str()) == 0 ? absl::OkStatus() : FileError(place);
  }
  // Returns AlreadyExists if there is a file.
  absl::Status PlaceAt(const std::string& place) const {
    return link(path_.c_str(), place.c_str()) == 0 ? absl::OkStatus() : FileError(place);
  }

 private:
  explicit Draft(std::string path) : path_(std::move(path)) {}

  std::string path_;
};

absl::Status CheckOwnersAlone(const std::string& folder) {
  struct stat info = {};
  if (lstat(folder.c_str(), &info) != 0) return FileError(folder);
  if (!S_ISDIR(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(folder, " is not a folder"));
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat("the folder ", folder, " belongs to user ",
                                                    info.st_uid, ", not to user ", geteuid(),
                                                    ": choose another one"));
  }
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("the folder ", folder,
                     " is accessible to other users, who could join the job: chmod 700 ", folder));
  }
  return absl::OkStatus();
}

// Creates the folder if needed.
absl::Status MakeFolder(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return FileError(folder);
  return CheckOwnersAlone(folder);
}

// A failed job removes its folder, perhaps while other ranks of it still start: then the folder is
// created again. A folder with a draft in it is not empty, and remains.
absl::StatusOr<Draft> WriteDraft(const std::string& folder, absl::string_view content) {
  absl::StatusOr<Draft> draft = Draft::Write(folder, content);
  if (!absl::IsNotFound(draft.status())) return draft;
  EK_RETURN_IF_ERROR(MakeFolder(folder));
  return Draft::Write(folder, content);
}

// A lock for one read and one write; the system releases it when its holder dies.
absl::StatusOr<UniqueFd> Lock(const std::string& path) {
  UniqueFd lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock) return FileError(path);
  const absl::Time deadline = SteadyNow() + kLockTimeout;
  while (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return FileError(path);
    if (SteadyNow() >= deadline)
      return absl::DeadlineExceededError(absl::StrCat(path, ": locked by another process"));
    absl::SleepFor(absl::Milliseconds(1));
  }
  return lock;
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileStore>> FileStore::Open(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  EK_RETURN_IF_ERROR(MakeFolder(folder));
  return absl::WrapUnique(new FileStore(std::move(folder)));
}

absl::Status FileStore::Set(absl::string_view key, absl::string_view value) {
  EK_ASSIGN_OR_RETURN(const std::string path, PathOf(folder_, key));
  EK_ASSIGN_OR_RETURN(const Draft draft, WriteDraft(folder_, value));
  return draft.Replace(path);
}

absl::StatusOr<std::string> FileStore::Get(absl::string_view key, absl::Duration timeout) {
  EK_ASSIGN_OR_RETURN(const std::string path, PathOf(folder_, key));
  const absl::Time deadline = SteadyNow() + timeout;
  absl::Duration pause = absl::Milliseconds(1);
  while (true) {
    absl::StatusOr<std::string> content = ReadFile(path, Links::kRefuse);
    if (!absl::IsNotFound(content.status())) return content;
    if (SteadyNow() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("no rank has set \"", key, "\" in ", folder_,
                                                      " within ", absl::FormatDuration(timeout)));
    }
    absl::SleepFor(std::min(pause, deadline - SteadyNow()));
    pause = std::min(pause * 2, absl::Milliseconds(50));
  }
}

absl::StatusOr<std::string> FileStore::GetOrSet(absl::string_view key, absl::string_view value) {
  EK_ASSIGN_OR_RETURN(const std::string path, PathOf(folder_, key));
  while (true) {
    absl::StatusOr<std::string> content = ReadFile(path, Links::kRefuse);
    if (!absl::IsNotFound(content.status())) return content;
    EK_ASSIGN_OR_RETURN(const Draft draft, WriteDraft(folder_, value));
    const absl::Status placed = draft.PlaceAt(path);
    if (placed.ok()) return std::string(value);
    if (!absl::IsAlreadyExists(placed)) return placed;
  }
}

absl::StatusOr<int64_t> FileStore::Add(absl::string_view key, int64_t amount) {
  EK_ASSIGN_OR_RETURN(const std::string path, PathOf(folder_, key));
  EK_ASSIGN_OR_RETURN(const UniqueFd lock, Lock(absl::StrCat(folder_, "/lock")));
  absl::StatusOr<std::string> content = ReadFile(path, Links::kRefuse);
  if (!content.ok() && !absl::IsNotFound(content.status())) return content.status();
  EK_ASSIGN_OR_RETURN(const int64_t sum, internal::AddTo(key, content.value_or(""), amount));
  EK_RETURN_IF_ERROR(Set(key, absl::StrCat(sum)));
  return sum;
}

absl::StatusOr<bool> FileStore::Check(absl::string_view key) {
  EK_ASSIGN_OR_RETURN(const std::string path, PathOf(folder_, key));
  if (access(path.c_str(), F_OK) == 0) return true;
  return errno == ENOENT ? absl::StatusOr<bool>(false) : FileError(path);
}

absl::StatusOr<bool> FileStore::Delete(absl::string_view key) {
  EK_ASSIGN_OR_RETURN(const std::string path, PathOf(folder_, key));
  if (unlink(path.c_str()) == 0) return true;
  return errno == ENOENT ? absl::StatusOr<bool>(false) : FileError(path);
}

}  // namespace evenkeel
