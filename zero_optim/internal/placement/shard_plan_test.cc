#include "evenkeel/zero_optim/internal/placement/shard_plan.h"

#include <random>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

OwnerTable OwnersOf(const std::vector<ParamSpec>& specs, const TrainableMask& mask,
                    int world_size) {
  std::vector<int64_t> sizes;
  std::vector<int> trained;
  for (size_t i = 0; i < specs.size(); ++i) {
    sizes.push_back(specs[i].count);
    if (mask[static_cast<int>(i)]) trained.push_back(static_cast<int>(i));
  }
  OwnerTable owners(sizes, world_size);
  EXPECT_TRUE(owners.Assign(trained).ok());
  return owners;
}

TEST(PlanShardsTest, HasABroadcastPerBucketInOwnerOrder) {
  const std::vector<ParamSpec> specs = {{.count = 100},
                                        {.count = 90},
                                        {.count = 5, .dtype = DType::kFloat64},
                                        {.count = 20},
                                        {.count = 7}};
  TrainableMask mask(5);
  mask.Set(4, false);
  const auto plan = PlanShards(specs, OwnersOf(specs, mask, 2), mask, 3, Bytes{400});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->buckets.size(), 3u);
  EXPECT_EQ(plan->buckets[0], (ShardBucket{.owner = 0, .count = 100, .params = {0}}));
  EXPECT_EQ(plan->buckets[1],
            (ShardBucket{.owner = 0, .dtype = DType::kFloat64, .count = 5, .params = {2}}));
  EXPECT_EQ(plan->buckets[2], (ShardBucket{.owner = 1, .count = 110, .params = {1, 3}}));
  EXPECT_EQ(plan->schedule.generation, 3u);
  ASSERT_EQ(plan->schedule.entries.size(), 3u);
  EXPECT_EQ(ToString(plan->schedule.entries[2]), "broadcast shard 2/3 float32[110] root 1");
  EXPECT_EQ(plan->schedule.entries[2].joined, Contribution::kOwned);
}

TEST(PlanShardsTest, IsEmptyIfNothingIsTrained) {
  const std::vector<ParamSpec> specs = {{.count = 10}};
  const TrainableMask mask(1, false);
  const auto plan = PlanShards(specs, OwnersOf(specs, mask, 2), mask, 0, kDefaultCap);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->buckets.empty());
  EXPECT_TRUE(plan->schedule.entries.empty());
}

TEST(PlanShardsTest, LeavesOutWhatHasNoOwner) {
  const std::vector<ParamSpec> specs = {{.count = 10}, {.count = 10}};
  TrainableMask first(2);
  first.Set(1, false);
  const OwnerTable owners = OwnersOf(specs, first, 2);
  const auto plan = PlanShards(specs, owners, TrainableMask(2), 0, kDefaultCap);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->buckets.size(), 1u);
  EXPECT_EQ(plan->buckets[0].params, std::vector<int>{0});
  EXPECT_TRUE(absl::IsInvalidArgument(
      BucketsByOwner(specs, owners, std::vector<int>{1}, kDefaultCap).status()));
}

TEST(PlanShardsTest, TellsPlansApartByOwnersAndByGeneration) {
  const std::vector<ParamSpec> specs = {{.count = 10}, {.count = 10}};
  const TrainableMask mask(2), none(2, false);
  const OwnerTable owners = OwnersOf(specs, mask, 2);
  const uint64_t hash = PlanShards(specs, owners, mask, 1, kDefaultCap)->hash;
  EXPECT_EQ(PlanShards(specs, owners, mask, 1, kDefaultCap)->hash, hash);
  EXPECT_NE(PlanShards(specs, owners, mask, 2, kDefaultCap)->hash, hash);
  EXPECT_NE(PlanShards(specs, owners, none, 1, kDefaultCap)->hash, hash);
  // Equal collectives, other owners of what is frozen.
  EXPECT_NE(PlanShards(specs, owners, none, 1, kDefaultCap)->hash,
            PlanShards(specs, OwnersOf(specs, none, 2), none, 1, kDefaultCap)->hash);
}

TEST(PlanShardsTest, PutsEachTrainedParameterIntoOneBucketOfItsOwner) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const int count = static_cast<int>(random() % 40),
              world_size = 1 + static_cast<int>(random() % 9);
    const Bytes cap{static_cast<int64_t>(random() % 3000)};
    SCOPED_TRACE(absl::StrCat("round ", round, ": ", count, " parameters, ", world_size, " ranks"));
    std::vector<ParamSpec> specs(count);
    TrainableMask mask(count);
    for (int i = 0; i < count; ++i) {
      specs[i].count = random() % 500;
      specs[i].dtype = random() % 3 == 0 ? DType::kFloat64 : DType::kFloat32;
      mask.Set(i, random() % 4 != 0);
    }
    const OwnerTable owners = OwnersOf(specs, mask, world_size);
    const auto plan = PlanShards(specs, owners, mask, 1, cap);
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::set<int> seen;
    int last_owner = 0;
    for (size_t b = 0; b < plan->buckets.size(); ++b) {
      const ShardBucket& bucket = plan->buckets[b];
      int64_t elements = 0;
      for (int param : bucket.params) {
        EXPECT_TRUE(mask[param] && seen.insert(param).second);
        EXPECT_EQ(owners.owner(param), bucket.owner);
        EXPECT_EQ(specs[param].dtype, bucket.dtype);
        elements += specs[param].count;
      }
      EXPECT_EQ(bucket.count, elements);
      EXPECT_EQ(plan->schedule.entries[b].count, elements);
      EXPECT_GE(bucket.owner, last_owner);
      last_owner = bucket.owner;
    }
    EXPECT_EQ(static_cast<int>(seen.size()), mask.CountTrained());
  }
}

}  // namespace
}  // namespace evenkeel::internal
