// Reads and writes files, most of them as a whole.
//
//   EK_ASSIGN_OR_RETURN(std::string bytes, ReadFile("config.json", {.max_bytes = 1 << 20}));
//   EK_RETURN_IF_ERROR(WriteFileAtomically("config.json", bytes));
//
// A written file is complete or absent, and an older one of that name stays until the new one is on
// the disk: the bytes go to a temporary file in the same folder, which is flushed and renamed.
//
// Threads: pure functions, safe from any thread.
// Errors:  NotFound, PermissionDenied, ... as the system says, always with the path;
//          ResourceExhausted beyond `max_bytes`; InvalidArgument for a folder, a device or a pipe.

#ifndef EVENKEEL_FILES_FILE_IO_H_
#define EVENKEEL_FILES_FILE_IO_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/cpp20.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel {

// A file that is open for reading.
struct RegularFile {
  internal::UniqueFd fd;
  std::string path;
  int64_t bytes = 0;

  // Returns DataLoss if the file ends before `into` is full.
  absl::Status ReadAt(int64_t offset, absl::Span<std::byte> into) const;
};
absl::StatusOr<RegularFile> OpenRegularFile(const std::string& path);

struct ReadFileOptions {
  int64_t max_bytes = int64_t{16} << 30;
};

absl::StatusOr<std::string> ReadFile(const std::string& path, const ReadFileOptions& options = {});

// Returns the error of the last system call: "ACTION PATH: No such file or directory".
absl::Status ErrnoStatus(absl::string_view action, const std::string& path);

// Returns the names of everything in a folder, in any order.
absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder);

// Flushes a folder to the disk. Without this a rename in it may be lost when the machine stops.
absl::Status FlushFolder(const std::string& folder);

// kNo does not wait for the disk: the file may be incomplete after the machine has stopped, or
// where a file system reports an error of writing only when it flushes.
enum class Flush { kYes, kNo };
absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes,
                                 Flush flush = Flush::kYes);
// `pieces` are written one after the other.
absl::Status WriteFileAtomically(const std::string& path, std::span<const absl::string_view> pieces,
                                 Flush flush = Flush::kYes);

// Returns the error that WriteFileAtomically() would begin with. Makes and deletes the temporary
// file: for root, access() reports success even where no file can be made, as in /proc.
absl::Status CheckCanWriteFile(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_FILES_FILE_IO_H_
