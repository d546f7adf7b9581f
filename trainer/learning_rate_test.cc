#include "evenkeel/trainer/learning_rate.h"

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
  for (int step = 0; step < 6; ++step) EXPECT_DOUBLE_EQ(LearningRate(schedule, step), expected[step]);
}

TEST(LearningRateTest, AnUnknownEndMeansNoDecay) {
  EXPECT_EQ(LearningRate({.base = 0.1, .decay = Decay::kLinear}, 5), 0.1);
}

}  // namespace
}  // namespace evenkeel
