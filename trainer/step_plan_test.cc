#include "evenkeel/trainer/step_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(StepPlanTest, CountsTheBatchesOfUnevenRanks) {
  const StepPlan plan = *MakeStepPlan({.world_size = 2, .samples = 60000, .batch_size = 96, .epochs = 4});
  EXPECT_THAT(plan.batches, ElementsAre(313, 312));
  EXPECT_TRUE(plan.is_uneven());
  EXPECT_EQ(plan.steps_per_epoch, 313);
  EXPECT_EQ(plan.total_steps, 4 * 313);
  EXPECT_EQ(plan.epochs(), 4);
  EXPECT_EQ(plan.FirstStep(3), 939);
  EXPECT_EQ(plan.BatchesOf(1, 3), 312);
}

TEST(StepPlanTest, MaxStepsCutsTheGroupsSteps) {
  const StepPlan plan = *MakeStepPlan(
      {.world_size = 2, .samples = 100, .batch_size = 10, .epochs = 3, .max_steps = 7, .rank_steps = {3, 5}});
  EXPECT_EQ(plan.total_steps, 7);
  EXPECT_EQ(plan.epochs(), 2);
  EXPECT_EQ(plan.BatchesOf(0, 0), 3);
  EXPECT_EQ(plan.BatchesOf(1, 0), 5);
  EXPECT_EQ(plan.BatchesOf(0, 1), 2);  // Steps 5 and 6.
  EXPECT_EQ(plan.BatchesOf(1, 1), 2);
  EXPECT_EQ(plan.BatchesOf(1, 2), 0);
}

// In every epoch some rank has a batch for each step of the group, and nobody has one beyond.
TEST(StepPlanTest, StepsAreThoseOfTheRankWithMost) {
  for (int world = 1; world <= 5; ++world) {
    for (int64_t batch_size : {1, 3, 7}) {
      for (int64_t max_steps : {0, 1, 5, 11, 1000}) {
        const StepPlan plan = *MakeStepPlan(
            {.world_size = world, .samples = 41, .batch_size = batch_size, .epochs = 3, .max_steps = max_steps});
        int64_t steps = 0;
        for (int epoch = 0; epoch < plan.epochs(); ++epoch) {
          EXPECT_EQ(plan.FirstStep(epoch), steps);
          int64_t most = 0;
          for (int rank = 0; rank < world; ++rank) most = std::max(most, plan.BatchesOf(rank, epoch));
          EXPECT_GT(most, 0);
          steps += most;
        }
        EXPECT_EQ(steps, plan.total_steps);
        EXPECT_EQ(plan.total_steps,
                  max_steps > 0 ? std::min(max_steps, 3 * plan.steps_per_epoch) : 3 * plan.steps_per_epoch);
      }
    }
  }
}

TEST(StepPlanTest, StoppingEarlyCountsToTheFirstDryRank) {
  StepPlanOptions options{
      .world_size = 2, .samples = 100, .batch_size = 10, .epochs = 3, .rank_steps = {3, 5}, .stops_early = true};
  EXPECT_EQ(MakeStepPlan(options)->total_steps, 3);
  EXPECT_EQ(MakeStepPlan(options)->BatchesOf(1, 0), 5);  // The ranks find out by themselves.
  options.rank_steps = {0, 5};
  EXPECT_EQ(MakeStepPlan(options)->total_steps, 0);
  EXPECT_EQ(MakeStepPlan(options)->epochs(), 3);
  options.rank_steps = {4, 4};
  EXPECT_EQ(MakeStepPlan(options)->total_steps, 12);
}

TEST(StepPlanTest, RefusesWhatDoesNotFitWithTheNumbers) {
  const struct {
    StepPlanOptions options;
    std::string says;
  } kCases[] = {
      {{.world_size = 8, .samples = 30, .batch_size = 5},
       "30 samples in batches of 5 are 6 batches, too few for 8 ranks"},
      {{.world_size = 2, .samples = 0, .batch_size = 5}, "0 samples"},
      {{.world_size = 3, .samples = 30, .batch_size = 5, .rank_steps = {1, 2}}, "2 numbers for 3 ranks"},
      {{.world_size = 2, .samples = 30, .batch_size = 5, .rank_steps = {3, 4}},
       "asks for 4 batches on rank 1, and the data has 3 for it"},
      {{.world_size = 2, .samples = 30, .batch_size = 5, .rank_steps = {0, 0}}, "no rank a batch"},
      {{.world_size = 2, .samples = 30, .batch_size = 5, .rank_steps = {1, 3}, .must_be_even = true},
       "rank 1 has 3 and rank 0 has 1"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = MakeStepPlan(c.options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << c.says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
}

TEST(StepPlanTest, MaxStepsCanMakeRanksEven) {
  EXPECT_TRUE(
      MakeStepPlan({.world_size = 2, .samples = 35, .batch_size = 5, .max_steps = 3, .must_be_even = true}).ok());
  EXPECT_FALSE(
      MakeStepPlan({.world_size = 2, .samples = 35, .batch_size = 5, .epochs = 2, .max_steps = 7, .must_be_even = true})
          .ok());
}

}  // namespace
}  // namespace evenkeel
