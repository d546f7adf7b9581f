#include "evenkeel/zero_optim/internal/placement/shard_move.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Four parameters, the last of which is frozen and has no owner; the others belong to ranks 0, 1
// and 2 of the old group.
ShardFacts Of(int old_rank, int64_t steps) {
  ShardFacts facts{.standing = {.steps_finished = steps, .checkpoint_hint = "there"},
                   .generation = 1,
                   .old_rank = old_rank,
                   .mask = TrainableMask(4),
                   .owners = {0, 1, 2, -1},
                   .was_updated = {1, 1, 1, 0},
                   .held_steps = {0, 0, 0, 0}};
  facts.mask.Set(3, false);
  if (old_rank < 3) facts.held_steps[old_rank] = steps;
  facts.standing.holds_state = old_rank < 3 && steps > 0;
  return facts;
}

std::string Refusal(const std::vector<ShardFacts>& by_rank) {
  const absl::Status status = PlanShardMove(by_rank, -1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(PlanShardMoveTest, FindsWhoBringsWhat) {
  // In another order, and with one that is new.
  ShardFacts fresh = Of(3, 0);
  fresh.owners = {0, 0, 0, -1};
  fresh.was_updated = {0, 0, 0, 0};
  fresh.generation = 0;
  absl::StatusOr<ShardMove> move = PlanShardMove({fresh, Of(2, 5), Of(0, 5), Of(1, 5)}, -1);
  ASSERT_TRUE(move.ok()) << move.status();
  EXPECT_THAT(move->holder, ElementsAre(2, 3, 1, -1));
  EXPECT_THAT(move->steps, ElementsAre(5, 5, 5, 0));
  EXPECT_THAT(move->owned, ElementsAre(0, 1, 2));
  EXPECT_EQ(move->generation, 2u);
}

TEST(PlanShardMoveTest, TheNewestPlanCountsUnlessARankIsNamed) {
  std::vector<ShardFacts> facts = {Of(0, 5), Of(1, 5), Of(2, 5)};
  facts[1].generation = 7;
  facts[1].mask.Set(3, true);
  EXPECT_TRUE(PlanShardMove(facts, -1)->mask[3]);
  EXPECT_THAT(PlanShardMove(facts, -1)->owned, ElementsAre(0, 1, 2, 3));
  EXPECT_FALSE(PlanShardMove(facts, 2)->mask[3]);
  EXPECT_EQ(PlanShardMove(facts, 2)->generation, 8u);
}

TEST(PlanShardMoveTest, NamesTheLostAndTheWayOut) {
  EXPECT_EQ(Refusal({Of(0, 5), Of(2, 5)}),
            "rank 1 is lost, and with it its part of the optimizer's state: resume from a "
            "checkpoint (there), or choose "
            "what to do with a lost shard (lost_shard)");
  EXPECT_THAT(Refusal({Of(2, 5)}), HasSubstr("ranks 0,1 are lost, and with them their parts"));
}

TEST(PlanShardMoveTest, WhatWasNeverUpdatedIsNotLost) {
  std::vector<ShardFacts> facts = {Of(0, 5), Of(2, 5)};
  for (ShardFacts& rank : facts) rank.was_updated[1] = 0;
  absl::StatusOr<ShardMove> move = PlanShardMove(facts, -1);
  ASSERT_TRUE(move.ok()) << move.status();
  EXPECT_THAT(move->holder, ElementsAre(0, -1, 1, -1));
  EXPECT_THAT(move->owned, ElementsAre(0, 1, 2)) << "it gets an owner all the same";
}

// Its steps were skipped, or no rank had a gradient of it; a new rank with the owner's number does
// not know that.
TEST(PlanShardMoveTest, WhatItsOwnerHasNeverUpdatedIsNotLost) {
  std::vector<ShardFacts> facts = {Of(0, 5), Of(1, 5), Of(2, 5)};
  facts[1].held_steps[1] = 0;
  absl::StatusOr<ShardMove> move = PlanShardMove(facts, -1);
  ASSERT_TRUE(move.ok()) << move.status();
  EXPECT_THAT(move->holder, ElementsAre(0, -1, 2, -1));
  EXPECT_THAT(move->owned, ElementsAre(0, 1, 2));
  facts[1].was_updated = {0, 0, 0, 0};
  EXPECT_THAT(Refusal(facts), HasSubstr("rank 1 is lost"));
}

TEST(PlanShardMoveTest, ShardsOfDifferentStepsDoNotFit) {
  EXPECT_THAT(
      Refusal({Of(0, 5), Of(1, 6), Of(2, 5)}),
      HasSubstr("rank 0 has finished 5 optimizer steps, rank 1 6, and a part of the optimizer's "
                "state cannot be taken back: resume from a checkpoint (there)"));
  std::vector<ShardFacts> torn = {Of(0, 5), Of(1, 5), Of(2, 5)};
  torn[2].standing.is_torn = true;
  EXPECT_THAT(Refusal(torn), HasSubstr("rank 2 was in the middle of an update"));
}

TEST(PlanShardMoveTest, NothingIsRefusedOnlyIfAllMayLoseState) {
  std::vector<ShardFacts> facts = {Of(0, 5), Of(2, 6)};
  facts[0].standing.may_lose = true;
  EXPECT_THAT(Refusal(facts), HasSubstr("rank 1 is lost"));
  facts[1].standing.may_lose = true;
  absl::StatusOr<ShardMove> move = PlanShardMove(facts, -1);
  ASSERT_TRUE(move.ok()) << move.status();
  EXPECT_THAT(move->holder, ElementsAre(0, -1, 1, -1));
  EXPECT_THAT(move->steps, ElementsAre(5, 0, 6, 0));
}

}  // namespace
}  // namespace evenkeel::internal
