// Reading files that may be packed by gzip, whatever their names.
//
//   EK_ASSIGN_OR_RETURN(std::string images, ReadUnpacked("train-images-idx3-ubyte.gz", 1 << 30));
//
// The file is mapped and must not become shorter meanwhile (mapped_file.h).
//
// Threads: pure functions, safe from any thread.
// Errors:  those of ReadFile() (file_io.h); DataLoss for gzip data that are damaged, end too early
//          or are followed by other bytes.

#ifndef EVENKEEL_TRAINER_DATA_UNPACK_H_
#define EVENKEEL_TRAINER_DATA_UNPACK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

absl::StatusOr<std::string> ReadUnpacked(const std::string& path, int64_t max_bytes);

// Returns the first `bytes` of the contents, or all of shorter ones, and unpacks no more.
absl::StatusOr<std::string> ReadUnpackedBegin(const std::string& path, uint32_t bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_UNPACK_H_
