#include "evenkeel/files/file_io.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// An open file; closes it, and deletes it if it is still temporary.
class File {
 public:
  explicit File(int descriptor, std::string temporary = "")
      : descriptor_(descriptor), temporary_(std::move(temporary)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
    if (!temporary_.empty()) unlink(temporary_.c_str());
  }

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  const std::string& temporary() const { return temporary_; }
  void Keep() { temporary_.clear(); }

 private:
  int descriptor_;
  std::string temporary_;
};

absl::Status WriteAll(int descriptor, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus("cannot write", path);
    bytes.remove_prefix(count);
  }
  return absl::OkStatus();
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status CheckTarget(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      path, S_ISDIR(info.st_mode) ? " is a folder" : " exists and is not a regular file"));
}

// Opens a file in the folder of `path`, to be renamed to it. Sets errno if it can't.
File OpenTemporary(const std::string& path) {
  // Not mkstemp, which would give the file to its owner alone, whatever the umask says.
  static std::atomic<int> number = 0;
  // O_EXCL: in a folder where others may write, the name could be a link of theirs. A process with
  // the same id may have left files.
  for (int tries = 0;; ++tries) {
    const std::string temporary = absl::StrCat(path, ".", getpid(), "-", ++number, ".tmp");
    const int descriptor = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor >= 0) return File(descriptor, temporary);
    if (errno != EEXIST || tries == 100) return File(descriptor, "");
  }
}

}  // namespace

absl::Status ErrnoStatus(absl::string_view action, const std::string& path) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(action, " ", path));
}

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename());
  if (!error) return names;
  return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read the folder ", folder));
}

absl::Status FlushFolder(const std::string& folder) {
  const File file(open(folder.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY));
  if (!file.is_open()) return ErrnoStatus("cannot open", folder);
  // Some file systems cannot flush a folder, and need not.
  if (fsync(file.descriptor()) != 0 && errno != EINVAL && errno != ENOTSUP)
    return ErrnoStatus("cannot flush", folder);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, const ReadFileOptions& options) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) return ErrnoStatus("cannot open", path);
  struct stat info;
  if (fstat(file.descriptor(), &info) != 0) return ErrnoStatus("cannot look at", path);
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  if (info.st_size > options.max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, " has ", info.st_size, " bytes, more than the ", options.max_bytes, " expected"));
  }
  std::string bytes(info.st_size, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = read(file.descriptor(), bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus("cannot read", path);
    if (count == 0)
      return absl::DataLossError(absl::StrCat(path, " became shorter while it was read"));
    done += count;
  }
  return bytes;
}

absl::Status CheckCanWriteFile(const std::string& path) {
  EK_RETURN_IF_ERROR(CheckTarget(path));
  return OpenTemporary(path).is_open() ? absl::OkStatus()
                                       : ErrnoStatus("cannot write to the folder", FolderOf(path));
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes, Flush flush) {
  return WriteFileAtomically(path, std::span<const absl::string_view>(&bytes, 1), flush);
}

absl::Status WriteFileAtomically(const std::string& path, std::span<const absl::string_view> pieces,
                                 Flush flush) {
  EK_RETURN_IF_ERROR(CheckTarget(path));
  File file = OpenTemporary(path);
  if (!file.is_open()) return ErrnoStatus("cannot create", path);
  const std::string temporary = file.temporary();
  for (absl::string_view piece : pieces)
    EK_RETURN_IF_ERROR(WriteAll(file.descriptor(), piece, temporary));
  if (flush == Flush::kYes && fsync(file.descriptor()) != 0)
    return ErrnoStatus("cannot flush", temporary);
  if (rename(temporary.c_str(), path.c_str()) != 0) return ErrnoStatus("cannot rename to", path);
  file.Keep();
  return flush == Flush::kYes ? FlushFolder(FolderOf(path)) : absl::OkStatus();
}

}  // namespace evenkeel
