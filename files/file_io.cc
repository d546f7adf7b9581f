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

// A file under a temporary name; deletes it if it still has one.
struct Temporary {
  ~Temporary() {
    fd = internal::UniqueFd();  // NFS keeps a file that is deleted while it is open.
    if (!path.empty()) unlink(path.c_str());
  }

  internal::UniqueFd fd;
  std::string path;
};

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
Temporary OpenTemporary(const std::string& path) {
  // Not mkstemp, which would give the file to its owner alone, whatever the umask says.
  static std::atomic<int> number = 0;
  // O_EXCL: in a folder where others may write, the name could be a link of theirs. A process with
  // the same id may have left files.
  for (int tries = 0;; ++tries) {
    const std::string temporary = absl::StrCat(path, ".", getpid(), "-", ++number, ".tmp");
    internal::UniqueFd fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (fd) return {std::move(fd), temporary};
    if (errno != EEXIST || tries == 100) return {};
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
  const internal::UniqueFd fd(open(folder.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY));
  if (!fd) return ErrnoStatus("cannot open", folder);
  // Some file systems cannot flush a folder, and need not.
  if (fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP)
    return ErrnoStatus("cannot flush", folder);
  return absl::OkStatus();
}

absl::StatusOr<RegularFile> OpenRegularFile(const std::string& path) {
  // O_NONBLOCK, because opening a pipe without a writer would wait.
  internal::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return ErrnoStatus("cannot open", path);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus("cannot read the attributes of", path);
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  return RegularFile{std::move(fd), path, info.st_size};
}

absl::Status RegularFile::ReadAt(int64_t offset, absl::Span<std::byte> into) const {
  while (!into.empty()) {
    const ssize_t count = pread(fd.get(), into.data(), into.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus("cannot read", path);
    if (count == 0)
      return absl::DataLossError(absl::StrCat(path, " became shorter while it was read"));
    into.remove_prefix(count);
    offset += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, const ReadFileOptions& options) {
  EK_ASSIGN_OR_RETURN(const RegularFile file, OpenRegularFile(path));
  if (file.bytes > options.max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, " has ", file.bytes, " bytes, more than the ", options.max_bytes, " expected"));
  }
  std::string bytes(file.bytes, '\0');
  EK_RETURN_IF_ERROR(
      file.ReadAt(0, absl::MakeSpan(reinterpret_cast<std::byte*>(bytes.data()), bytes.size())));
  return bytes;
}

absl::Status CheckCanWriteFile(const std::string& path) {
  EK_RETURN_IF_ERROR(CheckTarget(path));
  return OpenTemporary(path).fd ? absl::OkStatus()
                                : ErrnoStatus("cannot write to the folder", FolderOf(path));
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes, Flush flush) {
  return WriteFileAtomically(path, std::span<const absl::string_view>(&bytes, 1), flush);
}

absl::Status WriteFileAtomically(const std::string& path, std::span<const absl::string_view> pieces,
                                 Flush flush) {
  EK_RETURN_IF_ERROR(CheckTarget(path));
  Temporary file = OpenTemporary(path);
  if (!file.fd) return ErrnoStatus("cannot create", path);
  for (absl::string_view piece : pieces) {
    if (!internal::WriteAll(file.fd.get(), piece)) return ErrnoStatus("cannot write", file.path);
  }
  if (flush == Flush::kYes && fsync(file.fd.get()) != 0)
    return ErrnoStatus("cannot flush", file.path);
  if (rename(file.path.c_str(), path.c_str()) != 0) return ErrnoStatus("cannot rename to", path);
  file.path.clear();
  return flush == Flush::kYes ? FlushFolder(FolderOf(path)) : absl::OkStatus();
}

}  // namespace evenkeel
