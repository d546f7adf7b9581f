#include "evenkeel/trainer/sampler.h"

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
          const BatchPlan plan{.samples = samples, .batch_size = batch_size, .rank = rank, .world_size = world_size};
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
  EXPECT_EQ(message([](BatchPlan& plan) { plan.samples = int64_t{1} << 31; }), "cannot train on 2147483648 samples");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.batch_size = 0; }), "batch size 0 is not possible");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.rank = 3; }), "there is no rank 3 among 3");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.rank = -1; }), "there is no rank -1 among 3");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.max_batches = -1; }), "a limit of -1 batches is not possible");
  EXPECT_EQ(message([](BatchPlan& plan) { plan.world_size = 9; }),
            "60 samples in batches of 8 are 8 batches, too few for 9 ranks");
}

}  // namespace
}  // namespace evenkeel
