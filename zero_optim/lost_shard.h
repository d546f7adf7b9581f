// What becomes of the state that a lost rank held, of an optimizer whose state is split over the ranks.

#ifndef EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_
#define EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_

#include <cstdint>

namespace evenkeel {

// When a rank is not in the new group, and with it the state that it held.
enum class LostShard : uint8_t {
  kRefuse,  // An error on all ranks, which says where to resume from.
  kFresh,   // That state begins anew, as for a parameter that is trained for the first time; the rest is kept as it is.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_
