// The treatment of an optimizer's split state when the rank that held a part of it is lost.

#ifndef EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_
#define EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_

#include <cstdint>

namespace evenkeel {

// Used when a part of the state is on no rank of the new group (Recover(), ReplaceGroup()).
enum class LostShard : uint8_t {
  kRefuse,  // An error on all ranks that names the checkpoint to resume from.
  kFresh,   // The lost part is reset, as for a parameter that is trained for the first time; the
            // rest does not change.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_LOST_SHARD_H_
