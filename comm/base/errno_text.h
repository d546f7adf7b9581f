// The error of a system call as text.

#ifndef EVENKEEL_COMM_BASE_ERRNO_TEXT_H_
#define EVENKEEL_COMM_BASE_ERRNO_TEXT_H_

#include <errno.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Returns the text of errno after the failed call: "connect: Connection refused".
inline std::string ErrnoText(absl::string_view call) {
  return absl::StrCat(call, ": ", std::strerror(errno));
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_ERRNO_TEXT_H_
