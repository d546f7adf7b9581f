#include "evenkeel/bucket/hooks/quantize.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using Floats = std::array<float, kQuantizedBlock>;
using Bytes = std::array<int8_t, kQuantizedBlock>;

TEST(QuantizeTest, LevelsAndRestAddUpToTheValues) {
  std::mt19937 random(11);
  for (const float magnitude : {1e-30f, 1e-6f, 1.0f, 1e20f}) {
    std::uniform_real_distribution<float> uniform(-magnitude, magnitude);
    Floats values, rest, sum{};
    for (float& value : values) value = uniform(random);
    values[17] = -magnitude;
    rest = values;
    Bytes levels;
    const float scale = QuantizeBlock(rest, levels);
    EXPECT_NEAR(scale * 127.0f / magnitude, 1.0, 1e-6);
    EXPECT_EQ(levels[17], -127);
    AddLevels(levels, scale, sum);
    for (int64_t i = 0; i < kQuantizedBlock; ++i) {
      EXPECT_LE(std::abs(rest[i]), scale * 0.50001f);
      EXPECT_NEAR(sum[i] + rest[i], values[i], 1e-6 * magnitude);
    }
  }
}

TEST(QuantizeTest, WhatIsTooSmallStays) {
  Floats values{};
  Bytes levels;
  EXPECT_EQ(QuantizeBlock(values, levels), 0.0f);
  values[3] = std::numeric_limits<float>::denorm_min() * 5;
  const Floats before = values;
  EXPECT_EQ(QuantizeBlock(values, levels), 0.0f);
  EXPECT_THAT(levels, testing::Each(0));
  EXPECT_EQ(values, before);
}

TEST(QuantizeTest, WhatIsNotFiniteIsSeenInTheWholeBlock) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    Floats values{}, sum{};
    values[200] = bad;
    Bytes levels;
    AddLevels(levels, QuantizeBlock(values, levels), sum);
    for (float one : sum) EXPECT_FALSE(std::isfinite(one));
    EXPECT_EQ(values[0], 0.0f);
  }
}

}  // namespace
}  // namespace evenkeel::internal
