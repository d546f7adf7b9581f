// Small files, whole.

#ifndef EVENKEEL_COMM_INTERNAL_READ_FILE_H_
#define EVENKEEL_COMM_INTERNAL_READ_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// What the last system call failed with, by its kind: NotFound, AlreadyExists, PermissionDenied, else Unavailable.
absl::Status FileError(absl::string_view path);

// In a folder that others may write to, a link could lead anywhere.
enum class Links { kFollow, kRefuse };
absl::StatusOr<std::string> ReadFile(const std::string& path, Links links);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_READ_FILE_H_
