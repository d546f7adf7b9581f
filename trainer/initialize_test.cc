#include "evenkeel/trainer/initialize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "evenkeel/trainer/stable_random.h"

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
  EXPECT_TRUE(std::ranges::equal(floats, doubles, {}, {}, [](double value) { return static_cast<float>(value); }));
}

}  // namespace
}  // namespace evenkeel
