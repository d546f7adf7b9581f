// JSON that somebody else wrote: an object without names that come twice, and not nested deeper
// than it should be.
//
//   EK_ASSIGN_OR_RETURN(const nlohmann::json header,
//                       ParseStrictJson(bytes, /*max_depth=*/3, "the header"));
//
// Memory is bounded by the size of the text. Errors: InvalidArgument, in which `what` names the
// text.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_STRICT_JSON_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_STRICT_JSON_H_

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text, int max_depth,
                                               absl::string_view what);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_STRICT_JSON_H_
