#include "evenkeel/join/steps/lagged_shares.h"

#include <cstdint>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int64_t kLag = 5;

LaggedShares::Options TwoRanks(int64_t steps_before = 0) {
  return {.limits = {.batch = 128, .quantum = 8, .least = {8, 8}, .most = {120, 120}},
          .lag = kLag,
          .steps_before = steps_before};
}

// Times of a rank that computes so many samples, each of which takes `sample_us`.
PhaseTimes TimesOf(int64_t samples, int64_t sample_us) {
  PhaseTimes times;
  times.busy(StepPhase::kBackward) = samples * sample_us;
  return times;
}

// Rank 1 is slow in the steps from 200 on.
std::vector<PhaseTimes> TimesOfStep(int64_t step, const std::vector<int64_t>& samples) {
  return {TimesOf(samples[0], 1000), TimesOf(samples[1], step < 200 ? 1000 : 3000)};
}

TEST(LaggedSharesTest, NeedsTheTimesOfTheStepsUpToTheLag) {
  LaggedShares shares(TwoRanks(/*steps_before=*/3));
  EXPECT_EQ(shares.LastNeeded(4), 0);
  EXPECT_EQ(shares.LastNeeded(8), 0);
  EXPECT_EQ(shares.LastNeeded(9), 4);
  EXPECT_TRUE(shares.CanDivide(8));
  EXPECT_FALSE(shares.CanDivide(9));
  shares.Add(3, {TimesOf(1, 1), TimesOf(1, 1)});
  EXPECT_FALSE(shares.CanDivide(9));
  shares.Add(4, {TimesOf(1, 1), TimesOf(1, 1)});
  EXPECT_TRUE(shares.CanDivide(9));
  // The first step of all has no times.
  EXPECT_EQ(LaggedShares(TwoRanks()).LastNeeded(kLag + 1), 0);
  EXPECT_EQ(LaggedShares(TwoRanks()).LastNeeded(kLag + 2), 2);
  // The times of step 19 are exchanged in step 20.
  shares.RestartAt(20);
  EXPECT_EQ(shares.LastNeeded(20), 18);
  EXPECT_EQ(shares.LastNeeded(18 + kLag), 18);
  EXPECT_EQ(shares.LastNeeded(19 + kLag), 19);
}

TEST(LaggedSharesTest, AStepsBatchesHaveTheSameShares) {
  LaggedShares shares(TwoRanks());
  EXPECT_THAT(shares.Divide(1, 128), ElementsAre(0, 64, 128));
  EXPECT_THAT(shares.Divide(1, 50), ElementsAre(0, 25, 50));
  EXPECT_THAT(shares.SamplesOf(1), ElementsAre(89, 89));
  shares.Divide(2, 1);
  EXPECT_THAT(shares.SamplesOf(2), ElementsAre(0, 1));
  shares.RestartAt(2);
  EXPECT_THAT(shares.SamplesOf(1), ElementsAre(89, 89));
  EXPECT_THAT(shares.SamplesOf(2), IsEmpty());
  // An evaluation, for example, comes before it.
  shares.Divide(2, 128);
  EXPECT_THAT(shares.SamplesOf(2), IsEmpty());
  shares.Divide(3, 128);
  EXPECT_THAT(shares.SamplesOf(3), ElementsAre(64, 64));
}

// Two ranks that see each step's times at other moments, as late as the lag allows.
TEST(LaggedSharesTest, SharesDoNotDependOnWhenTimesArrive) {
  constexpr int64_t kSteps = 600;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    LaggedShares ranks[2] = {LaggedShares(TwoRanks()), LaggedShares(TwoRanks())};
    int64_t added[2] = {1, 1};
    std::vector<std::vector<int64_t>> samples(1);  // By step.
    for (int64_t step = 1; step <= kSteps; ++step) {
      std::vector<int64_t> boundaries[2];
      for (int rank : {0, 1}) {
        const auto newest = std::uniform_int_distribution<int64_t>(step - kLag, step - 1)(random);
        while (added[rank] < newest || !ranks[rank].CanDivide(step)) {
          ++added[rank];
          ranks[rank].Add(added[rank], TimesOfStep(added[rank], samples[added[rank]]));
        }
        boundaries[rank] = ranks[rank].Divide(step, 128);
      }
      ASSERT_EQ(boundaries[0], boundaries[1]) << "step " << step;
      samples.push_back({boundaries[0][1], 128 - boundaries[0][1]});
    }
    EXPECT_THAT(samples[150], ElementsAre(64, 64));
    EXPECT_THAT(samples.back(), ElementsAre(96, 32));
  }
}

// Passes over the data that end early, before a rank has trained what it has loaded.
TEST(LaggedSharesTest, SharesDoNotDependOnHowFarARankLoadsAhead) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    LaggedShares ranks[2] = {LaggedShares(TwoRanks()), LaggedShares(TwoRanks())};
    std::vector<std::vector<int64_t>> samples(1);  // By step that was trained.
    int64_t added[2] = {1, 1};
    const auto boundary = [&](int rank, int64_t step) {
      for (; !ranks[rank].CanDivide(step); ++added[rank])
        ranks[rank].Add(added[rank] + 1, TimesOfStep(added[rank] + 1, samples[added[rank] + 1]));
      return ranks[rank].Divide(step, 128)[1];
    };
    while (samples.size() < 600) {
      const auto first = static_cast<int64_t>(samples.size());
      const int64_t steps = std::uniform_int_distribution<int64_t>(1, 40)(random);
      int64_t divided[2] = {first, first};
      std::vector<int64_t> firsts[2];
      for (int64_t step = first; step < first + steps; ++step) {
        for (int rank : {0, 1}) {
          // Rank 0 loads as far ahead as it may, rank 1 each batch when it is trained.
          const int64_t end = rank == 0 ? step + kLag - 1 : step + 1;
          for (; divided[rank] < end; ++divided[rank])
            firsts[rank].push_back(boundary(rank, divided[rank]));
        }
        ASSERT_EQ(firsts[0][step - first], firsts[1][step - first]) << "step " << step;
        samples.push_back({firsts[0][step - first], 128 - firsts[0][step - first]});
      }
      for (LaggedShares& rank : ranks) rank.RestartAt(first + steps);
    }
    EXPECT_LT(samples.back()[1], 64);
  }
}

}  // namespace
}  // namespace evenkeel
