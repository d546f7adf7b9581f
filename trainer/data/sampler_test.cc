#include "evenkeel/trainer/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace evenkeel {
namespace {

TEST(SamplerTest, BatchesOfARankAreConsecutiveSamples) {
  const BatchPlan plan{.samples = 60, .batch_size = 8, .rank = 1, .world_size = 3};
  const std::vector<int32_t> order = InOrder(60);
  ASSERT_EQ(BatchCount(plan), 3);  // 8 batches for 3 ranks: 3, 3, 2.
  for (int64_t b = 0; b < 2; ++b) {
    const auto batch = BatchSamples(plan, order, b);
    ASSERT_EQ(batch.size(), 8u);
    EXPECT_EQ(batch[0], (b * 3 + 1) * 8);
    EXPECT_EQ(batch[7], (b * 3 + 1) * 8 + 7);
  }
  EXPECT_EQ(BatchSamples(plan, order, 2).size(), 4u);  // The last of all is not full.
}

TEST(SamplerTest, AllRanksTogetherSeeEachSampleOnce) {
  for (int64_t samples : {1, 2, 7, 64, 97, 1000}) {
    for (int64_t batch_size : {1, 2, 5, 64, 2000}) {
      for (int world_size : {1, 2, 3, 5, 8}) {
        SCOPED_TRACE(testing::Message() << samples << " " << batch_size << " " << world_size);
        const std::vector<int32_t> order = ShuffledOrder(samples, 1, 0);
        std::vector<int32_t> seen;
        int64_t fewest = INT64_MAX, most = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const BatchPlan plan{
              .samples = samples, .batch_size = batch_size, .rank = rank, .world_size = world_size};
          const size_t before = seen.size();
          for (int64_t b = 0; b < BatchCount(plan); ++b) {
            const auto batch = BatchSamples(plan, order, b);
            EXPECT_FALSE(batch.empty());
            seen.insert(seen.end(), batch.begin(), batch.end());
          }
          EXPECT_EQ(SampleCount(plan), static_cast<int64_t>(seen.size() - before));
          fewest = std::min(fewest, BatchCount(plan));
          most = std::max(most, BatchCount(plan));
        }
        std::ranges::sort(seen);
        EXPECT_EQ(seen, InOrder(samples));
        EXPECT_LE(most - fewest, 1);
      }
    }
  }
}

// The batches that `plan` gives its ranks in the group's steps [0, steps), appended to `seen`.
void Take(BatchPlan plan, const std::vector<int32_t>& order, int64_t steps,
          std::vector<int32_t>& seen) {
  for (int64_t step = 0; step < steps; ++step) {
    for (plan.rank = 0; plan.rank < plan.world_size; ++plan.rank) {
      if (step >= BatchCount(plan)) continue;
      const auto batch = BatchSamples(plan, order, step);
      EXPECT_FALSE(batch.empty());
      seen.insert(seen.end(), batch.begin(), batch.end());
    }
  }
}

TEST(SamplerTest, AnEpochGoesOnWithOtherRanksWithoutDroppingOrRepeatingASample) {
  for (int64_t samples : {1, 7, 64, 97, 240}) {
    const std::vector<int32_t> order = ShuffledOrder(samples, 1, 0);
    for (int64_t batch_size : {1, 3, 5, 64}) {
      for (int before : {2, 4, 5}) {
        for (int after = 1; after < before; ++after) {
          const BatchPlan plan{.samples = samples, .batch_size = batch_size, .world_size = before};
          const int64_t all = BatchCount(plan);  // Rank 0 has most.
          for (int64_t steps : {int64_t{0}, int64_t{1}, all / 2, all - 1, all, all + 3}) {
            if (steps < 0) continue;
            SCOPED_TRACE(testing::Message() << samples << " in " << batch_size << ", " << before
                                            << " ranks to " << after << " after " << steps);
            std::vector<int32_t> seen;
            Take(plan, order, steps, seen);
            EXPECT_EQ(SamplesDone(plan, steps), static_cast<int64_t>(seen.size()));
            BatchPlan rest = plan;
            rest.first = SamplesDone(plan, steps);
            rest.world_size = after;
            EXPECT_TRUE(CheckBatchPlan(rest).ok() || steps == 0);
            // A second rank is lost one step later.
            Take(rest, order, 1, seen);
            EXPECT_EQ(SamplesDone(rest, 1), static_cast<int64_t>(seen.size()));
            BatchPlan last = rest;
            last.first = SamplesDone(rest, 1);
            last.world_size = 1;
            Take(last, order, BatchCount(last), seen);
            // In this very order: what comes after a loss does not depend on which rank was lost.
            EXPECT_EQ(seen, order);
          }
        }
      }
    }
  }
}

// As a job does that is stopped and started again with what there is to run it: from a position
// alone, fewer ranks or more than before.
TEST(SamplerTest, AnEpochGoesOnOverSeveralWorldSizesWithEachSampleOnce) {
  for (int64_t samples : {1, 12, 97, 1000, 4099}) {
    const std::vector<int32_t> order = ShuffledOrder(samples, 5, 2);
    for (int64_t batch_size : {1, 3, 16}) {
      for (int64_t steps : {1, 2, 5}) {
        for (const std::vector<int>& worlds :
             {std::vector<int>{4, 3, 8}, {1, 8, 5, 2}, {8, 1}, {3, 3, 3}}) {
          SCOPED_TRACE(testing::Message()
                       << samples << " in " << batch_size << ", " << steps << " steps on "
                       << worlds[0] << ", then " << worlds[1] << " ranks");
          int64_t position = 0;
          std::vector<int32_t> seen;
          for (size_t i = 0; i < worlds.size(); ++i) {
            const BatchPlan plan{.samples = samples,
                                 .first = position,
                                 .batch_size = batch_size,
                                 .world_size = worlds[i]};
            const bool is_last = i + 1 == worlds.size();
            const int64_t taken = is_last ? BatchCount(plan) : steps;
            Take(plan, order, taken, seen);
            position = SamplesDone(plan, taken);
            EXPECT_EQ(position, static_cast<int64_t>(seen.size()));
          }
          EXPECT_EQ(position, samples);
          EXPECT_EQ(seen, order);
        }
      }
    }
  }
}

// The counts that each rank computes for its own part, without the others, add up.
TEST(SamplerTest, RanksOfTheRestHaveAllOfItsSamples) {
  for (int64_t first : {0, 1, 500, 999, 1000}) {
    for (int world_size : {1, 3, 8}) {
      int64_t sum = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        sum += SampleCount({.samples = 1000,
                            .first = first,
                            .batch_size = 7,
                            .rank = rank,
                            .world_size = world_size});
      }
      EXPECT_EQ(sum, 1000 - first) << world_size << " ranks from " << first;
    }
  }
}

TEST(SamplerTest, TheLargestDataSetsDoNotOverflow) {
  const BatchPlan plan{.samples = INT32_MAX, .batch_size = INT32_MAX, .rank = 0, .world_size = 1};
  EXPECT_TRUE(CheckBatchPlan(plan).ok());
  EXPECT_EQ(SamplesDone(plan, INT64_MAX), INT32_MAX);
  const BatchPlan many{.samples = INT32_MAX,
                       .first = 1 << 30,
                       .batch_size = 3,
                       .rank = 99'999,
                       .world_size = 100'000};
  EXPECT_TRUE(CheckBatchPlan(many).ok());
  EXPECT_EQ(BatchCount(many), 3579);
  EXPECT_EQ(SamplesDone(many, 3579), (int64_t{1} << 30) + int64_t{3579} * 300'000);
  EXPECT_EQ(SamplesDone(many, 3580), INT32_MAX);
}

TEST(SamplerTest, TheRestOfAnEpochMayBeTooShortForAllRanks) {
  BatchPlan rest{.samples = 40, .first = 30, .batch_size = 8, .rank = 0, .world_size = 3};
  EXPECT_TRUE(CheckBatchPlan(rest).ok());
  EXPECT_EQ(BatchCount(rest), 1);
  EXPECT_EQ(SampleCount(rest), 8);
  rest.rank = 1;
  EXPECT_EQ(BatchCount(rest), 1);
  EXPECT_EQ(SampleCount(rest), 2);
  rest.rank = 2;
  EXPECT_EQ(BatchCount(rest), 0);
  EXPECT_EQ(SampleCount(rest), 0);
  rest.first = 40;
  for (rest.rank = 0; rest.rank < 3; ++rest.rank) EXPECT_EQ(BatchCount(rest), 0);
}

TEST(SamplerTest, ALimitEndsARankEarlier) {
  BatchPlan plan{.samples = 100, .batch_size = 10, .rank = 0, .world_size = 2, .max_batches = 3};
  EXPECT_EQ(BatchCount(plan), 3);
  EXPECT_EQ(SampleCount(plan), 30);
  plan.max_batches = 0;
  EXPECT_EQ(BatchCount(plan), 0);
  EXPECT_EQ(SampleCount(plan), 0);
  plan.max_batches = 50;
  EXPECT_EQ(BatchCount(plan), 5);
}

TEST(SamplerTest, ShufflingIsAPermutationBySeedAndEpoch) {
  const std::vector<int32_t> order = ShuffledOrder(1000, 7, 3);
  EXPECT_EQ(order, ShuffledOrder(1000, 7, 3));
  EXPECT_NE(order, ShuffledOrder(1000, 7, 4));
  EXPECT_NE(order, ShuffledOrder(1000, 8, 3));
  std::vector<int32_t> sorted = order;
  std::ranges::sort(sorted);
  EXPECT_EQ(sorted, InOrder(1000));
}

TEST(SamplerTest, ShufflingNeverChanges) {
  // Recorded once: a resumed run must see the same order.
  EXPECT_EQ(ShuffledOrder(10, 0, 0), (std::vector<int32_t>{5, 3, 7, 1, 8, 4, 0, 2, 9, 6}));
}

TEST(SamplerTest, ShufflingIsEven) {
  // Where sample 0 of 5 lands, over 50000 epochs.
  std::vector<int> counts(5);
  for (int epoch = 0; epoch < 50000; ++epoch) {
    const auto order = ShuffledOrder(5, 1, epoch);
    ++counts[std::ranges::find(order, 0) - order.begin()];
  }
  for (int count : counts) EXPECT_NEAR(count, 10000, 540);  // Six standard deviations.
}

TEST(SamplerTest, SaysWhatIsWrongWithAPlan) {
  const BatchPlan good{.samples = 60, .batch_size = 8, .rank = 1, .world_size = 3};
  EXPECT_TRUE(CheckBatchPlan(good).ok());
  const auto message = [&](auto change) {
    BatchPlan plan = good;
    change(plan);
    const absl::Status status = CheckBatchPlan(plan);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(message([](BatchPlan& plan) { plan.samples = 0; }), "cannot train on 0 samples");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.samples = int64_t{1} << 31; }),
            "cannot train on 2147483648 samples");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.batch_size = 0; }),
            "batch size must be at least 1, got 0");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.rank = 3; }), "rank 3 is out of range for 3 ranks");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.rank = -1; }),
            "rank -1 is out of range for 3 ranks");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.first = -1; }),
            "position -1 is out of range for 60 samples");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.first = 61; }),
            "position 61 is out of range for 60 samples");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.max_batches = -1; }),
            "the limit of batches must not be negative, got -1");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.world_size = 9; }),
            "60 samples in batches of 8 are 8 batches, too few for 9 ranks");
}

}  // namespace
}  // namespace evenkeel
