#include "evenkeel/zero_optim/checkpoint/file_io.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
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

// ---- Reading ----

absl::StatusOr<std::string> Read(const std::string& path, const ReadFileOptions& options) {
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
  constexpr int64_t kBegin = 1 << 16;
  std::string bytes(options.only_begin ? std::min<int64_t>(info.st_size, kBegin) : info.st_size,
                    '\0');
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

bool BeginsAsGzip(absl::string_view bytes) { return bytes.substr(0, 2) == "\x1f\x8b"; }

struct InflateEnd {
  z_stream* stream;
  ~InflateEnd() { inflateEnd(stream); }
};

// The contents of a gzip file of one or more members.
absl::StatusOr<std::string> Gunzip(const std::string& path, absl::string_view packed,
                                   const ReadFileOptions& options) {
  const int64_t max_bytes = options.max_bytes;
  const auto damaged = [&](absl::string_view how) {
    return absl::DataLossError(absl::StrCat(path, ": ", how));
  };
  constexpr int kGzipOnly = 16 + MAX_WBITS;
  z_stream stream = {};
  if (inflateInit2(&stream, kGzipOnly) != Z_OK)
    return absl::ResourceExhaustedError("zlib is out of memory");
  const InflateEnd end{&stream};

  std::string unpacked;
  // The last four bytes are the size of the last member, modulo 2^32. Deflate packs 1032 bytes into
  // one at most, so that a damaged size takes no memory without end.
  uint64_t size = 0;
  for (size_t i = packed.size(); i-- > packed.size() - 4;)
    size = size << 8 | static_cast<uint8_t>(packed[i]);
  if (!options.only_begin) {
    unpacked.reserve(
        std::min<uint64_t>({size, 1032 * packed.size(), static_cast<uint64_t>(max_bytes)}));
  }
  std::string chunk(1 << 18, '\0');
  while (true) {
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
    stream.avail_in = static_cast<uInt>(std::min<size_t>(packed.size(), 1 << 30));
    const uInt given = stream.avail_in;
    stream.next_out = reinterpret_cast<Bytef*>(chunk.data());
    stream.avail_out = static_cast<uInt>(chunk.size());
    const int code = inflate(&stream, Z_NO_FLUSH);
    if (code == Z_MEM_ERROR) return absl::ResourceExhaustedError("zlib is out of memory");
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) {
      return damaged(
          absl::StrCat("damaged gzip data after ", unpacked.size(), " bytes of content"));
    }
    packed.remove_prefix(given - stream.avail_in);
    unpacked.append(chunk, 0, chunk.size() - stream.avail_out);
    if (options.only_begin && !unpacked.empty()) return unpacked;
    if (static_cast<int64_t>(unpacked.size()) > max_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(path, " unpacks to more than the ", max_bytes, " bytes expected"));
    }
    if (code == Z_STREAM_END) {
      if (packed.empty()) return unpacked;
      if (!BeginsAsGzip(packed))
        return damaged(absl::StrCat(packed.size(), " bytes follow the end of the gzip data"));
      inflateReset(&stream);
    } else if (code == Z_BUF_ERROR) {  // No progress: more input is needed, and there is none.
      return damaged(absl::StrCat("the gzip data ends too early, after ", unpacked.size(),
                                  " bytes of content"));
    }
  }
}

// ---- Writing ----

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
  const std::string temporary = absl::StrCat(path, ".", getpid(), "-", ++number, ".tmp");
  const int descriptor = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  return File(descriptor, descriptor < 0 ? "" : temporary);
}

}  // namespace

absl::Status ErrnoStatus(absl::string_view action, const std::string& path) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(action, " ", path));
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
  EK_ASSIGN_OR_RETURN(std::string bytes, Read(path, options));
  if (options.gunzip && BeginsAsGzip(bytes)) return Gunzip(path, bytes, options);
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
