// How much the ranks check that they issue the same collectives.
//
//   EVENKEEL_VERIFY=every bazel run //trainer:train           # or, in code:
//   CommunicatorOptions options{.verify = VerifyLevel::kEvery};
//   EK_RETURN_IF_ERROR(comm.SetVerifyLevel(VerifyLevel::kPositions));   // while it runs, on all ranks
//
// Whatever the level, a transport that carries a tag or a header never pairs two different collectives: that is free.
// The levels differ in how soon, and over which transports, a divergence becomes an error that names it. Sends and
// receives are matters of pairs, which are not compared beside their data; ranks that wait for them in vain are found.
//
// Errors: InvalidArgument names the unknown word and the known ones.

#ifndef EVENKEEL_COMM_VERIFY_H_
#define EVENKEEL_COMM_VERIFY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

enum class VerifyLevel : uint8_t {
  kOff,        // A divergence ends at the operation's deadline, or when a rank leaves.
  kPositions,  // Ranks that are stuck tell each other where they are: an error within seconds, with all positions. Over
               // transports without headers, what was issued is compared before reduced gradients are used. The
               // default.
  kEvery,      // Each collective is compared over the control plane before its data is used.
};
absl::string_view ToString(VerifyLevel level);  // "off", "positions", "every"
absl::StatusOr<VerifyLevel> VerifyLevelFromString(absl::string_view name);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_VERIFY_H_
