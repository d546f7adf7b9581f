#include "evenkeel/comm/base/start_thread.h"

#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel::internal {

absl::StatusOr<std::thread> StartThread(absl::string_view purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot start a thread for ", purpose, ": ", error.what(),
        ": raise the limit of this user's processes and threads (ulimit -u) or of the container's "
        "(pids.max), free memory, or start fewer ranks"));
  }
}

}  // namespace evenkeel::internal
