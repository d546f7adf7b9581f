#include "evenkeel/trainer/data/stable_random.h"

#include <gtest/gtest.h>

#include <vector>

namespace evenkeel {
namespace {

TEST(StableRandomTest, NeverChanges) {
  // Recorded once. A change here changes every shuffle and every starting weight: resumed runs
  // would differ.
  StableRandom random(1, 2);
  EXPECT_EQ(random.Next(), 5796968857530213156u);
  EXPECT_EQ(random.Next(), 12605939039934760871u);
  EXPECT_EQ(random.Below(1000), 876u);
  EXPECT_EQ(random.Uniform(), 0x1.e022487a18702p-1);
}

TEST(StableRandomTest, StreamsAndSeedsDiffer) {
  const uint64_t first = StableRandom(1, 1).Next();
  EXPECT_NE(first, StableRandom(1, 2).Next());
  EXPECT_NE(first, StableRandom(2, 1).Next());
  EXPECT_EQ(first, StableRandom(1, 1).Next());
}

TEST(StableRandomTest, BelowIsEvenAndInside) {
  constexpr int kBound = 7, kDraws = 70000;
  StableRandom random(3);
  std::vector<int> counts(kBound);
  for (int i = 0; i < kDraws; ++i) ++counts.at(random.Below(kBound));
  // Six standard deviations of a count of 10000.
  for (int count : counts) EXPECT_NEAR(count, kDraws / kBound, 560);
}

TEST(StableRandomTest, BelowOneIsZeroAndHugeBoundsWork) {
  StableRandom random(4);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(random.Below(1), 0u);
    EXPECT_LT(random.Below((uint64_t{1} << 63) + 1), (uint64_t{1} << 63) + 1);
  }
}

TEST(StableRandomTest, UniformCoversTheUnitInterval) {
  StableRandom random(5);
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const double value = random.Uniform();
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    sum += value;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
}

}  // namespace
}  // namespace evenkeel
