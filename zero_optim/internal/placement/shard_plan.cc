#include "evenkeel/zero_optim/internal/placement/shard_plan.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::vector<ShardBucket>> BucketsByOwner(std::span<const ParamSpec> specs,
                                                        const OwnerTable& owners,
                                                        std::span<const int> chosen, Bytes cap) {
  std::vector<std::vector<int>> owned(owners.world_size());
  for (int param : chosen) {
    if (owners.owner(param) == kNoOwner) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", param, " has no owner"));
    }
    owned[owners.owner(param)].push_back(param);
  }

  std::vector<ShardBucket> buckets;
  for (int rank = 0; rank < owners.world_size(); ++rank) {
    if (owned[rank].empty()) continue;
    std::vector<ParamSpec> own_specs;
    for (int param : owned[rank]) own_specs.push_back(specs[param]);
    EK_ASSIGN_OR_RETURN(const BucketPlan plan, PlanBuckets(own_specs, {.caps = {cap}}));
    for (const std::vector<int>& positions : plan.buckets) {
      ShardBucket bucket{.owner = rank, .dtype = own_specs[positions.front()].dtype};
      for (int position : positions) {
        bucket.params.push_back(owned[rank][position]);
        bucket.count += own_specs[position].count;
      }
      buckets.push_back(std::move(bucket));
    }
  }
  return buckets;
}

absl::StatusOr<ShardPlan> PlanShards(std::span<const ParamSpec> specs, OwnerTable owners,
                                     TrainableMask mask, uint64_t generation, Bytes cap) {
  ShardPlan plan{.generation = generation, .mask = std::move(mask), .owners = std::move(owners)};
  std::vector<int> trained;
  for (int param = 0; param < plan.mask.size(); ++param) {
    if (plan.mask[param] && plan.owners.owner(param) != kNoOwner) trained.push_back(param);
  }
  EK_ASSIGN_OR_RETURN(plan.buckets, BucketsByOwner(specs, plan.owners, trained, cap));

  plan.schedule.generation = generation;
  const int bucket_count = static_cast<int>(plan.buckets.size());
  for (int index = 0; index < bucket_count; ++index) {
    const ShardBucket& bucket = plan.buckets[index];
    plan.schedule.entries.push_back({.kind = CollectiveKind::kBroadcast,
                                     .dtype = bucket.dtype,
                                     .count = bucket.count,
                                     .root = bucket.owner,
                                     .role = Role::kShard,
                                     .index = index,
                                     .index_count = bucket_count,
                                     .joined = Contribution::kOwned});
  }
  plan.mask_hash = plan.mask.Hash();
  plan.hash = StableHash(plan.schedule.Hash(), plan.owners.Serialize());
  return plan;
}

}  // namespace evenkeel::internal
