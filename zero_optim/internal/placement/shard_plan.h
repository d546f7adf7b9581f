// The communication of a sharded optimizer, planned ahead: who owns which parameter, and in which
// buckets owners send out their updated parameters. A pure function of its inputs, so that equal
// plans need no messages between ranks.
//
//   EK_ASSIGN_OR_RETURN(ShardPlan plan,
//                       PlanShards(specs, owners, params.mask(), /*generation=*/3, kDefaultCap));
//   // plan.schedule.entries[b] broadcasts the parameters plan.buckets[b].params from
//     plan.buckets[b].owner
//
// Units:   counts in elements.
// Order:   buckets by owner, then by their first parameter; parameters ascending. One dtype per
//          bucket.
// Threads: immutable values and pure functions.
// Errors:  InvalidArgument for a chosen parameter without owner, or a negative cap.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SHARD_PLAN_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SHARD_PLAN_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/partition.h"

namespace evenkeel::internal {

struct ShardBucket {
  int owner = 0;
  DType dtype = DType::kFloat32;
  int64_t count = 0;
  std::vector<int> params;
  friend bool operator==(const ShardBucket&, const ShardBucket&) = default;
};

// The parameters `chosen` (ascending), in buckets that close at `cap`.
absl::StatusOr<std::vector<ShardBucket>> BucketsByOwner(std::span<const ParamSpec> specs,
                                                        const OwnerTable& owners,
                                                        std::span<const int> chosen, Bytes cap);

struct ShardPlan {
  uint64_t generation = 0;  // Grows with each change.
  TrainableMask mask;
  OwnerTable owners;
  std::vector<ShardBucket> buckets;  // For the trained parameters.
  Schedule schedule;                 // An entry per bucket.
  uint64_t mask_hash = 0;
  uint64_t hash = 0;  // Covers schedule and owners.
  std::string note;   // For messages: what is frozen.
  std::optional<OwnerTable>
      better;  // To whom the state should go before the next step, if this is too uneven.
};

// A parameter that is trained but has no owner belongs to another optimizer.
absl::StatusOr<ShardPlan> PlanShards(std::span<const ParamSpec> specs, OwnerTable owners,
                                     TrainableMask mask, uint64_t generation, Bytes cap);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SHARD_PLAN_H_
