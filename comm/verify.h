// How thoroughly the ranks check that they issue the same collectives.
//
//   EVENKEEL_VERIFY=every bazel run //trainer:train           # or, in code:
//   CommunicatorOptions options{.verify = VerifyLevel::kEvery};
//   // while it runs, on all ranks
//   EK_RETURN_IF_ERROR(comm.SetVerifyLevel(VerifyLevel::kPositions));
//
// On every level, a transport that carries a tag or a header never pairs two different collectives;
// this costs nothing. The levels differ in how soon, and over which transports, a divergence
// becomes an error that names it. Sends and receives involve two ranks only, and are not compared
// beside their data; ranks that wait for them in vain are found.
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
  kPositions,  // Stuck ranks exchange their positions: an error with all positions within seconds.
               // Over transports without headers, issued collectives are compared before reduced
               // gradients are used. The default.
  kEvery,      // Each collective is compared over the control plane before its data is used.
};
absl::string_view ToString(VerifyLevel level);  // "off", "positions", "every"
absl::StatusOr<VerifyLevel> VerifyLevelFromString(absl::string_view name);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_VERIFY_H_
