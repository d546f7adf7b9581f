// The list of Joinables that RunJoined() and Recover() take, checked and in the order of all ranks.
//
//   EK_ASSIGN_OR_RETURN(const std::vector<Joinable*> ordered, InOrder("RunJoined", joinables));

#ifndef EVENKEEL_JOIN_INTERNAL_JOIN_LIST_H_
#define EVENKEEL_JOIN_INTERNAL_JOIN_LIST_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

// Returns the list by phase and name, the same order on all ranks. InvalidArgument, which begins
// with `call`, for an empty list, and for an entry that is null or in the list twice.
absl::StatusOr<std::vector<Joinable*>> InOrder(absl::string_view call,
                                               absl::Span<Joinable* const> joinables);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_INTERNAL_JOIN_LIST_H_
