// The properties of an operation that ranks must agree on, whatever carries the data.
//
//   if (!Agree(mine, theirs)) ...                        // where both are at hand
//   if (HashOfCommonPart(mine) != their_hash) ...        // where only a hash travels
//
// The two halves of a message agree if they have the same elements in the same parts for the same
// purpose. Which rank sends and which one receives is not compared: that is a matter of the lane in
// which they meet.
//
// Threads: pure functions.

#ifndef EVENKEEL_COMM_ARITH_COMMON_PART_H_
#define EVENKEEL_COMM_ARITH_COMMON_PART_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {

// The description that both sides of a pair, or all ranks, share.
Collective CommonPart(Collective what);

// Sizes of the views, in elements. Empty where they may differ between the ranks.
std::vector<int64_t> PartsOf(const Operation& operation);

// True if two ranks' operations fit together, with the same parts.
bool Agree(const Operation& a, const Operation& b);

// A hash of the properties that Agree() compares. Equal on all builds and machines.
uint64_t HashOfCommonPart(const Operation& operation);

// Returns the number of elements that a rank with the input `in` has for rank `to` in an uneven
// collective (IsUneven()). The functions above do not compare those sizes, because each rank knows
// only its own.
int64_t UnevenCount(const Collective& what, const TensorList& in, int to);
// Returns the error of two ranks with different sizes for the data between them.
absl::Status SizesDisagree(const Collective& what, int64_t sequence, int sender, int64_t sent,
                           int receiver, int64_t expected);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_COMMON_PART_H_
