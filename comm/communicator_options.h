// The options of a group (comm/communicator.h).
//
//   CommunicatorOptions options{.timeout = absl::Minutes(1), .flight = {.folder = "/tmp/job"}};

#ifndef EVENKEEL_COMM_COMMUNICATOR_OPTIONS_H_
#define EVENKEEL_COMM_COMMUNICATOR_OPTIONS_H_

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "evenkeel/comm/verify.h"

namespace evenkeel {

inline constexpr absl::Duration kDefaultTimeout = absl::Minutes(10);

// How ranks watch each other. Equal on all ranks, since the first rank that gives up ends the
// group. A rank in a debugger is silent, too: debug with a longer `silence`.
struct WatchOptions {
  // Interval of the heartbeats. Infinite: no heartbeats, and no watching.
  absl::Duration beat = absl::Seconds(1);
  // A rank whose heartbeat is overdue for this long is lost. 0 disables the check.
  absl::Duration silence = absl::Seconds(5);
  absl::Duration stall_warning = absl::Seconds(10);  // A longer wait logs one warning.
  // Receives warnings on a thread of the communicator, and must not call it. Null: warnings go to
  // stderr.
  std::function<void(const std::string& text)> warn;
};

struct FlightOptions {
  size_t capacity = 1024;  // Finished operations that are kept.
  // When the group fails, or ends without Finalize(), each rank writes the file
  // <folder>/<group>.rank<r>.json, and replaces an earlier one. The folder is created if needed.
  // Empty: no file.
  std::string folder;
};

struct CommunicatorOptions {
  absl::Duration timeout = kDefaultTimeout;  // The time for an operation or a control exchange.
  // Equal on all ranks, or the group ends at once. Unset: EVENKEEL_VERIFY if a factory has read the
  // environment, else kPositions.
  std::optional<VerifyLevel> verify;
  WatchOptions watch;
  FlightOptions flight;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_COMMUNICATOR_OPTIONS_H_
