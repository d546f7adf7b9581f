#include "evenkeel/trainer/data/step_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(StepPlanTest, CountsTheBatchesOfUnevenRanks) {
  const StepPlan plan =
      *MakeStepPlan({.world_size = 2, .samples = 60000, .batch_size = 96, .epochs = 4});
  EXPECT_THAT(plan.batches, ElementsAre(313, 312));
  EXPECT_TRUE(plan.is_uneven());
  EXPECT_EQ(plan.steps_per_epoch, 313);
  EXPECT_EQ(plan.total_steps, 4 * 313);
  EXPECT_EQ(plan.epochs(), 4);
  EXPECT_EQ(plan.FirstStep(3), 939);
  EXPECT_EQ(plan.BatchesOf(1, 3), 312);
}

TEST(StepPlanTest, BalancedRanksTakePartInEachStep) {
  const StepPlan plan = *MakeStepPlan(
      {.world_size = 2, .samples = 60000, .batch_size = 96, .epochs = 4, .balances = true});
  EXPECT_THAT(plan.batches, ElementsAre(313, 313));
  EXPECT_FALSE(plan.is_uneven());
  EXPECT_EQ(plan.BatchesOf(1, 3), 313);
  EXPECT_EQ(plan.total_steps, 4 * 313);
  const StepPlan rest = *plan.GoOn(plan.PositionAfter(412), 2);
  EXPECT_EQ(rest.begin.samples, 99 * 2 * 96);
  EXPECT_THAT(rest.begin_batches, ElementsAre(214, 214));
}

TEST(StepPlanTest, MaxStepsCutsTheGroupsSteps) {
  const StepPlan plan = *MakeStepPlan({.world_size = 2,
                                       .samples = 100,
                                       .batch_size = 10,
                                       .epochs = 3,
                                       .max_steps = 7,
                                       .rank_steps = {3, 5}});
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
        const StepPlan plan = *MakeStepPlan({.world_size = world,
                                             .samples = 41,
                                             .batch_size = batch_size,
                                             .epochs = 3,
                                             .max_steps = max_steps});
        int64_t steps = 0;
        for (int epoch = 0; epoch < plan.epochs(); ++epoch) {
          EXPECT_EQ(plan.FirstStep(epoch), steps);
          int64_t most = 0;
          for (int rank = 0; rank < world; ++rank)
            most = std::max(most, plan.BatchesOf(rank, epoch));
          EXPECT_GT(most, 0);
          steps += most;
        }
        EXPECT_EQ(steps, plan.total_steps);
        EXPECT_EQ(plan.total_steps, max_steps > 0 ? std::min(max_steps, 3 * plan.steps_per_epoch)
                                                  : 3 * plan.steps_per_epoch);
      }
    }
  }
}

TEST(StepPlanTest, GoesOnWithFewerRanksInTheMiddleOfAnEpoch) {
  const StepPlan plan =
      *MakeStepPlan({.world_size = 2, .samples = 60000, .batch_size = 96, .epochs = 4});
  const EpochPosition at = plan.PositionAfter(412);
  EXPECT_EQ(at, (EpochPosition{.epoch = 1, .step = 412, .samples = 99 * 2 * 96}));
  const StepPlan next = *plan.GoOn(at, 1);
  EXPECT_THAT(next.begin_batches, ElementsAre(427));  // 625 - 198.
  EXPECT_EQ(next.BatchesOf(0, 1), 427);
  EXPECT_EQ(next.BatchesOf(0, 2), 625);
  EXPECT_EQ(next.FirstStep(1), 412);
  EXPECT_EQ(next.FirstStep(2), 412 + 427);
  EXPECT_EQ(next.total_steps, 412 + 427 + 2 * 625);
  EXPECT_EQ(next.epochs(), 4);
}

TEST(StepPlanTest, ThereIsNothingLeftAtTheEndOfAnEpoch) {
  const StepPlan plan =
      *MakeStepPlan({.world_size = 4, .samples = 41, .batch_size = 5, .epochs = 3});
  ASSERT_EQ(plan.steps_per_epoch, 3);  // 9 batches: 3, 2, 2, 2.
  // Not yet evaluated, perhaps.
  EXPECT_EQ(plan.PositionAfter(6), (EpochPosition{.epoch = 1, .step = 6, .samples = 41}));
  const StepPlan same = *plan.GoOn(plan.PositionAfter(6), 3);
  EXPECT_THAT(same.begin_batches, ElementsAre(0, 0, 0));
  EXPECT_EQ(same.FirstStep(2), 6);
  EXPECT_EQ(same.epochs(), 3);
  // Evaluated.
  EXPECT_EQ(plan.PositionAfter(6, /*epochs_done=*/2), (EpochPosition{.epoch = 2, .step = 6}));
  const StepPlan next = *plan.GoOn(plan.PositionAfter(6, 2), 3);
  EXPECT_THAT(next.begin_batches, ElementsAre(3, 3, 3));
  EXPECT_EQ(next.total_steps, 9);
  // All of them.
  EXPECT_EQ(plan.PositionAfter(9), (EpochPosition{.epoch = 2, .step = 9, .samples = 41}));
  EXPECT_EQ(plan.GoOn(plan.PositionAfter(9), 3)->epochs(), 3);
  EXPECT_EQ(plan.PositionAfter(9, 3), (EpochPosition{.epoch = 3, .step = 9}));
  const StepPlan over = *plan.GoOn(plan.PositionAfter(9, 3), 3);
  EXPECT_EQ(over.epochs(), 3);
  EXPECT_EQ(over.total_steps, 9);
  EXPECT_EQ(over.PositionAfter(9, 3), (EpochPosition{.epoch = 3, .step = 9}));
}

// The samples that are dealt out in each epoch, as a run goes through plans that take over from
// each other.
class Dealt {
 public:
  Dealt(int64_t samples, int64_t batch_size, int epochs)
      : samples_(samples), batch_size_(batch_size), by_epoch_(epochs) {}

  void Deal(const StepPlan& plan, int64_t until) {
    for (int epoch = plan.begin.epoch; epoch < plan.epochs(); ++epoch) {
      EXPECT_TRUE(step_ == until || step_ == plan.FirstStep(epoch));
      int64_t& done = by_epoch_[epoch];
      EXPECT_TRUE(epoch != plan.begin.epoch || done == plan.begin.samples);
      int64_t most = 0;
      for (size_t rank = 0; rank < plan.batches.size(); ++rank) {
        most = std::max(most, plan.BatchesOf(static_cast<int>(rank), epoch));
      }
      for (int64_t b = 0; b < most && step_ < until; ++b, ++step_) {
        for (size_t rank = 0; rank < plan.batches.size(); ++rank) {
          if (b < plan.BatchesOf(static_cast<int>(rank), epoch))
            done += std::min(batch_size_, samples_ - done);
        }
      }
    }
  }

  int64_t step() const { return step_; }
  const std::vector<int64_t>& by_epoch() const { return by_epoch_; }

 private:
  const int64_t samples_;
  const int64_t batch_size_;
  std::vector<int64_t> by_epoch_;
  int64_t step_ = 0;
};

// Wherever the number of ranks changes, once and again: each epoch's samples are dealt out once,
// and steps count on.
TEST(StepPlanTest, EverySampleIsDealtOutOnceWhereverRanksComeAndGo) {
  for (const std::vector<int>& worlds : {std::vector<int>{4, 3, 2}, {4, 3, 8}, {2, 7, 1}}) {
    for (int64_t max_steps : {0, 7, 11}) {
      const StepPlan first = *MakeStepPlan({.world_size = worlds[0],
                                            .samples = 41,
                                            .batch_size = 3,
                                            .epochs = 3,
                                            .max_steps = max_steps});
      for (int64_t at = 0; at <= first.total_steps; ++at) {
        const StepPlan second = *first.GoOn(first.PositionAfter(at), worlds[1]);
        for (int64_t later = at; later <= second.total_steps; ++later) {
          SCOPED_TRACE(testing::Message() << worlds[1] << " ranks after " << at << ", " << worlds[2]
                                          << " after " << later << " of " << max_steps);
          const StepPlan third = *second.GoOn(second.PositionAfter(later), worlds[2]);
          Dealt dealt(41, 3, 3);
          dealt.Deal(first, at);
          dealt.Deal(second, later);
          dealt.Deal(third, third.total_steps);
          EXPECT_EQ(dealt.step(), third.total_steps);
          const bool is_all = dealt.by_epoch() == std::vector<int64_t>(3, 41);
          EXPECT_TRUE(is_all || dealt.step() == max_steps)
              << testing::PrintToString(dealt.by_epoch());
        }
      }
    }
  }
}

TEST(StepPlanTest, WhatIsSaidAboutCertainRanksDoesNotGoOn) {
  for (const StepPlanOptions& options :
       {StepPlanOptions{.world_size = 2, .samples = 40, .rank_steps = {3, 5}},
        StepPlanOptions{.world_size = 2, .samples = 40, .stops_early = true}}) {
    const StepPlan plan = *MakeStepPlan(options);
    EXPECT_TRUE(absl::IsInvalidArgument(plan.GoOn(plan.PositionAfter(1), 1).status()));
  }
}

TEST(StepPlanTest, StoppingEarlyCountsToTheFirstDryRank) {
  StepPlanOptions options{.world_size = 2,
                          .samples = 100,
                          .batch_size = 10,
                          .epochs = 3,
                          .rank_steps = {3, 5},
                          .stops_early = true};
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
      {{.world_size = 3, .samples = 30, .batch_size = 5, .rank_steps = {1, 2}},
       "2 numbers for 3 ranks"},
      {{.world_size = 2, .samples = 30, .batch_size = 5, .rank_steps = {3, 4}},
       "asks for 4 batches on rank 1, and the data has 3 for it"},
      {{.world_size = 2, .samples = 30, .batch_size = 5, .rank_steps = {0, 0}}, "no rank a batch"},
      {{.world_size = 2,
        .samples = 30,
        .batch_size = 5,
        .rank_steps = {1, 3},
        .must_be_even = true},
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
      MakeStepPlan(
          {.world_size = 2, .samples = 35, .batch_size = 5, .max_steps = 3, .must_be_even = true})
          .ok());
  EXPECT_FALSE(MakeStepPlan({.world_size = 2,
                             .samples = 35,
                             .batch_size = 5,
                             .epochs = 2,
                             .max_steps = 7,
                             .must_be_even = true})
                   .ok());
}

}  // namespace
}  // namespace evenkeel
