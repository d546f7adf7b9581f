// Reads small files as a whole.

#ifndef EVENKEEL_COMM_BASE_READ_FILE_H_
#define EVENKEEL_COMM_BASE_READ_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Returns the error of the last system call: NotFound, AlreadyExists, PermissionDenied, else
// Unavailable.
absl::Status FileError(absl::string_view path);

// In a folder to which others may write, a link could point anywhere.
enum class Links { kFollow, kRefuse };
absl::StatusOr<std::string> ReadFile(const std::string& path, Links links);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_READ_FILE_H_
