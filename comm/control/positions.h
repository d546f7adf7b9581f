// The position of a rank on each of its channels, which it sends when it leaves, and the comparison
// of all ranks' positions.
//
//   Positions mine{{"user", {413, hash, "barrier (user)"}}};
//   absl::Status same = ComparePositions("Finalize", all);  // of every rank's Serialize(mine)
//
// Threads: pure functions of values.

#ifndef EVENKEEL_COMM_CONTROL_POSITIONS_H_
#define EVENKEEL_COMM_CONTROL_POSITIONS_H_

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
  uint64_t hash = 0;     // The hash of all of them.
  std::string last;      // The last one, for messages.
};
// By the name of the channel, which contains no tab or line end.
using Positions = std::map<std::string, ChannelPosition>;

std::string Serialize(const Positions& positions);
// Skips lines that are malformed.
Positions ParsePositions(absl::string_view text);

// `parts` has one entry per rank. Returns FailedPrecondition: "Finalize: channel "user": rank 1
// ended after 5 (barrier (user)); ranks 0,2 ended after 4 (...): the ranks disagree". All ranks
// compute it from the same parts, so all return the same.
absl::Status ComparePositions(absl::string_view caller, const std::vector<std::string>& parts);

// Returns the name of the optimizer that issues `collective`, a collective's text, on `channel` in
// its steps, and only there: "optimizer#0". Empty if there is none.
absl::string_view OptimizerIn(absl::string_view collective, absl::string_view channel);
// Returns "rank 1 has not taken the step of optimizer#0 in which ranks 0,2 wait: every rank must
// take every step".
std::string OmittedStep(const std::vector<int>& omitters, absl::string_view optimizer,
                        const std::vector<int>& waiting);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_POSITIONS_H_
