// Checksums of a file, block by block, so that a part of it can be read and believed without the
// rest.
//
//   EK_ASSIGN_OR_RETURN(const FileSums sums, SumsOf("state.safetensors"));  // kept somewhere else
//   EK_ASSIGN_OR_RETURN(CheckedFile file, CheckedFile::Open("state.safetensors", sums));
//   EK_RETURN_IF_ERROR(file.Read(/*offset=*/4096, into));  // what lies there, or an error
//
// Neither holds more than one block. CRC-32 detects accidental damage,
// not a forged file.
//
// Threads: FileSums is a value; a CheckedFile is thread-compatible.
// Errors:  DataLoss, with the path, for a file that is not the one that was summed up; the file
//          system's own.

#ifndef EVENKEEL_FILES_FILE_SUMS_H_
#define EVENKEEL_FILES_FILE_SUMS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/cpp20.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {

inline constexpr int64_t kSumBlock = 256 << 10;  // Bytes.

struct FileSums {
  int64_t bytes = 0;
  std::vector<uint32_t> blocks;  // One per kSumBlock bytes; the last one covers the rest.

  // Eight hexadecimal digits per block; and back, InvalidArgument unless those are the blocks of so
  // many bytes.
  std::string Hex() const;
  static absl::StatusOr<FileSums> FromHex(int64_t bytes, absl::string_view hex);

  friend bool operator==(const FileSums&, const FileSums&) = default;
};

absl::StatusOr<FileSums> SumsOf(const std::string& path);

class CheckedFile {
 public:
  static absl::StatusOr<CheckedFile> Open(const std::string& path, FileSums sums);

  absl::Status Read(int64_t offset, absl::Span<std::byte> into);

 private:
  CheckedFile(RegularFile file, FileSums sums) : file_(std::move(file)), sums_(std::move(sums)) {}
  absl::Status Fetch(int64_t block);

  RegularFile file_;
  FileSums sums_;
  int64_t fetched_ = -1;          // The block that is in memory.
  std::vector<std::byte> block_;  // Empty before the first.
};

}  // namespace evenkeel

#endif  // EVENKEEL_FILES_FILE_SUMS_H_
