// The error of a system call as text.

#ifndef EVENKEEL_COMM_BASE_ERRNO_TEXT_H_
#define EVENKEEL_COMM_BASE_ERRNO_TEXT_H_

#include <errno.h>
#include <sys/resource.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Returns the text of errno after the failed call: "connect: Connection refused". If the process
// has no descriptor left, the text contains its limit; other ranks may receive it, too.
inline std::string ErrnoText(absl::string_view call) {
  const int error = errno;
  std::string text = absl::StrCat(call, ": ", std::strerror(error));
  rlimit files = {};
  if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &files) == 0) {
    absl::StrAppend(&text, ": the limit of the process is ", files.rlim_cur,
                    " (raise it with ulimit -n)");
  }
  return text;
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_ERRNO_TEXT_H_
