// Causes that slow down the core of this process. Each lasts until its object is destroyed.
//
//   EK_ASSIGN_OR_RETURN(const auto throttle, Throttle::Create());
//   EK_RETURN_IF_ERROR(throttle->SetShare(0.8));  // of one core, for the whole process
//
// Threads: thread-compatible.
// Errors:  Unavailable where control groups cannot be made: it needs root, and version 1's
//          controller `cpu`.

#ifndef EVENKEEL_TESTS_STRAGGLERS_SLOW_CORE_H_
#define EVENKEEL_TESTS_STRAGGLERS_SLOW_CORE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

// A control group of this process, which has at most a share of a core in each 10 ms.
class Throttle {
 public:
  static absl::StatusOr<std::unique_ptr<Throttle>> Create();
  ~Throttle();
  absl::Status SetShare(double share);

 private:
  explicit Throttle(std::string parent);

  const std::string parent_, own_;  // Folders.
};

// Pins this thread, and the processes that it starts, to a core.
void PinTo(int core);

// Uses the core for 1 ms at a time, so that another process there takes `1 + fraction` times as
// long. Does not return.
[[noreturn]] void BeBusyNeighbour(double fraction);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_STRAGGLERS_SLOW_CORE_H_
