// Where a rank is on each of its channels, as it says when it leaves, and whether all ranks are at the same place.
//
//   Positions mine{{"user", {413, hash, "barrier (user)"}}};
//   absl::Status same = ComparePositions("Finalize", all);        // of every rank's Serialize(mine)
//
// Threads: pure functions of values.

#ifndef EVENKEEL_COMM_INTERNAL_POSITIONS_H_
#define EVENKEEL_COMM_INTERNAL_POSITIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// The sequence of control records counts as a channel, too.
inline constexpr char kStepsChannel[] = "training steps";

struct ChannelPosition {
  int64_t position = 0;  // Collectives issued.
  uint64_t hash = 0;     // Of all of them.
  std::string last;      // For people.
};
using Positions = std::map<std::string, ChannelPosition>;  // By the channel's name, which has no tab or line end.

std::string Serialize(const Positions& positions);
// Leaves out what it does not understand.
Positions ParsePositions(absl::string_view text);

// `parts`: of each rank. FailedPrecondition: "Finalize: channel "user": rank 1 ended after 5 (barrier (user)); ranks 0,2
// ended after 4 (...): the ranks disagree". All ranks compute it from the same parts, so all get the same answer.
absl::Status ComparePositions(absl::string_view caller, const std::vector<std::string>& parts);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_POSITIONS_H_
