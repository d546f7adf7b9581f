#include "evenkeel/tools/measure/paired_ratio.h"

#include <vector>

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(PairedRatioTest, DriftOfTheMachineCancelsOut) {
  std::vector<double> a, b;
  for (int i = 0; i < 40; ++i) {
    const double slowness = 1 + 0.1 * i;  // Grows to five times.
    a.push_back(1.02 * slowness);
    b.push_back(slowness);
  }
  const PairedRatio ratio = RatioOf(a, b);
  EXPECT_NEAR(ratio.median, 1.02, 1e-9);
  EXPECT_NEAR(ratio.low, 1.02, 1e-9);
  EXPECT_NEAR(ratio.high, 1.02, 1e-9);
  EXPECT_EQ(ratio.pairs, 40);
}

TEST(PairedRatioTest, TheIntervalHoldsTheMedianAndGrowsWithTheSpread) {
  std::vector<double> even(30, 1.0), narrow, wide;
  for (int i = 0; i < 30; ++i) {
    narrow.push_back(1 + 0.001 * (i - 15));
    wide.push_back(1 + 0.02 * (i - 15));
  }
  const PairedRatio a = RatioOf(narrow, even), b = RatioOf(wide, even);
  EXPECT_LE(a.low, a.median);
  EXPECT_GE(a.high, a.median);
  EXPECT_GT(b.high - b.low, 10 * (a.high - a.low));
}

TEST(PairedRatioTest, OneOutlierMovesNothing) {
  std::vector<double> a(31, 1.0), b(31, 1.0);
  a[7] = 100;
  EXPECT_EQ(RatioOf(a, b).median, 1.0);
  EXPECT_EQ(RatioOf(a, b).high, 1.0);
}

TEST(QuantileTest, InterpolatesBetweenTwoValues) {
  const std::vector<double> values = {3, 1, 2, 5};
  EXPECT_EQ(QuantileOf(values, 0), 1);
  EXPECT_EQ(QuantileOf(values, 0.25), 1.75);
  EXPECT_EQ(MedianOf(values), 2.5);
  EXPECT_EQ(QuantileOf(values, 1), 5);
  EXPECT_EQ(QuantileOf(std::vector<double>{7}, 0.75), 7);
}

TEST(PairedRatioTest, SaysItInOneLine) {
  const std::vector<double> a = {2.0}, b = {1.0};
  EXPECT_EQ(RatioOf(a, b).ToString(), "2.000 [2.000, 2.000], 1 pairs");
}

}  // namespace
}  // namespace evenkeel
