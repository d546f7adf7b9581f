#include "evenkeel/trainer/layers/initialize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

TEST(FillUniformTest, StaysWithinTheLimitAndUsesAllOfIt) {
  std::vector<float> values(1000);
  FillUniform(std::span(values), 0.25, StableRandom(1));
  EXPECT_GE(std::ranges::min(values), -0.25f);
  EXPECT_LE(std::ranges::max(values), 0.25f);
  EXPECT_LT(std::ranges::min(values), -0.24f);
  EXPECT_GT(std::ranges::max(values), 0.24f);
}

TEST(FillUniformTest, FloatsAreTheRoundedDoubles) {
  std::vector<float> floats(100);
  std::vector<double> doubles(100);
  FillUniform(std::span(floats), 1, StableRandom(1));
  FillUniform(std::span(doubles), 1, StableRandom(1));
  EXPECT_TRUE(std::ranges::equal(floats, doubles, {}, {},
                                 [](double value) { return static_cast<float>(value); }));
}

TEST(FillNormalTest, HasTheMomentsOfANormalDistribution) {
  // With 100000 draws the k-th moment is off by a few times sqrt(E[x^2k] / 100000): below 0.02,
  // 0.03 and 0.2.
  std::vector<double> values(100000);
  FillNormal(std::span(values), 2, StableRandom(3));
  double mean = 0, square = 0, fourth = 0;
  for (double value : values) {
    const double x = value / 2;
    mean += x / 1e5, square += x * x / 1e5, fourth += x * x * x * x / 1e5;
  }
  EXPECT_NEAR(mean, 0, 0.02);
  EXPECT_NEAR(square, 1, 0.03);
  EXPECT_NEAR(fourth, 3, 0.2);
}

TEST(FillNormalTest, FloatsAreTheRoundedDoubles) {
  std::vector<float> floats(100);
  std::vector<double> doubles(100);
  FillNormal(std::span(floats), 0.02, StableRandom(1));
  FillNormal(std::span(doubles), 0.02, StableRandom(1));
  EXPECT_TRUE(std::ranges::equal(floats, doubles, {}, {},
                                 [](double value) { return static_cast<float>(value); }));
}

}  // namespace
}  // namespace evenkeel
