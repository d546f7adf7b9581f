#include "evenkeel/trainer/app/learning_rate.h"

#include <gtest/gtest.h>

namespace evenkeel {
namespace {

TEST(LearningRateTest, StaysWithoutDecay) {
  EXPECT_EQ(LearningRate({.base = 0.1, .total_steps = 10}, 0), 0.1);
  EXPECT_EQ(LearningRate({.base = 0.1, .total_steps = 10}, 100), 0.1);
}

TEST(LearningRateTest, FallsInEqualStepsToZero) {
  const LearningRateSchedule schedule{.base = 0.5, .decay = Decay::kLinear, .total_steps = 4};
  const double expected[] = {0.5, 0.375, 0.25, 0.125, 0, 0};
  for (int step = 0; step < 6; ++step)
    EXPECT_DOUBLE_EQ(LearningRate(schedule, step), expected[step]);
}

TEST(LearningRateTest, AnUnknownEndMeansNoDecay) {
  EXPECT_EQ(LearningRate({.base = 0.1, .decay = Decay::kLinear}, 5), 0.1);
}

TEST(LearningRateTest, WarmsUpAndThenFollowsTheCosineToATenth) {
  const LearningRateSchedule schedule{
      .base = 1, .decay = Decay::kCosine, .warmup = 3, .total_steps = 13};
  for (int step = 0; step < 3; ++step)
    EXPECT_DOUBLE_EQ(LearningRate(schedule, step), (step + 1) / 4.0);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 3), 1);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 8), 0.55);  // Half-way.
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 13), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 99), 0.1);
}

TEST(LearningRateTest, LinearDecayBeginsAfterTheWarmUp) {
  const LearningRateSchedule schedule{
      .base = 1, .decay = Decay::kLinear, .warmup = 1, .total_steps = 5};
  const double expected[] = {0.5, 1, 0.75, 0.5, 0.25, 0};
  for (int step = 0; step < 6; ++step)
    EXPECT_DOUBLE_EQ(LearningRate(schedule, step), expected[step]);
}

}  // namespace
}  // namespace evenkeel
