// The treatment of an optimizer's split state when the rank that held a part of it is lost.

#ifndef EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_
#define EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_

#include <cstdint>

namespace evenkeel {

// Used when a part of the state is on no rank of the new group (Recover(), ReplaceGroup()).
enum class LostShard : uint8_t {
  kRefuse,  // An error on all ranks that names the checkpoint to resume from.
  kFresh,   // Each parameter of which an element's state is lost begins again, as one that is
            // trained for the first time: with Slices every parameter of which the lost rank had a
            // part.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_
