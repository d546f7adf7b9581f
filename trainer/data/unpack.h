// Reading whole files that may be packed by gzip, for data that delay the start of a run.
//
//   EK_ASSIGN_OR_RETURN(std::string images, ReadUnpacked("train-images-idx3-ubyte.gz", 1 << 30));
//
// Returns and reports exactly what ReadFile() of file_io.h does with `gunzip`. A file of one gzip
// member is unpacked by libdeflate, which takes half of zlib's time but only unpacks whole buffers
// of known size; zlib does the rest. The packed file is mapped and must not become shorter
// meanwhile (mapped_file.h).
//
// Threads: pure function, safe from any thread.

#ifndef EVENKEEL_TRAINER_DATA_UNPACK_H_
#define EVENKEEL_TRAINER_DATA_UNPACK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

absl::StatusOr<std::string> ReadUnpacked(const std::string& path, int64_t max_bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_UNPACK_H_
