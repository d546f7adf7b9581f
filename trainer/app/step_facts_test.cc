#include "evenkeel/trainer/app/step_facts.h"

#include <gtest/gtest.h>

#include <cmath>

#include "absl/time/time.h"
#include "evenkeel/trainer/app/training_run.h"

namespace evenkeel {
namespace {

StepFacts Facts() {
  return {.samples = 12,
          .own = BatchResult{.loss_mean = 0.5, .predictions = 40, .correct = 10},
          .own_samples = 4,
          .took = absl::Milliseconds(200),
          .sync = absl::Milliseconds(50)};
}

TEST(StepNumbersTest, SayWhatAStepCostAndGave) {
  const StepNumbers numbers = NumbersOf(Facts(), 10);
  EXPECT_EQ(numbers.loss, 0.5);
  EXPECT_EQ(numbers.accuracy, 0.25);
  EXPECT_EQ(numbers.exposed_ms, 50);
  EXPECT_EQ(numbers.exposed_ratio, 0.25);
  EXPECT_EQ(numbers.step_ms, 200);
  EXPECT_DOUBLE_EQ(numbers.predictions_per_second, 600);
}

TEST(StepNumbersTest, ADryRankKnowsTheSpeedOnly) {
  StepFacts facts = Facts();
  facts.own.reset();
  const StepNumbers numbers = NumbersOf(facts, 1);
  EXPECT_TRUE(std::isnan(numbers.loss) && std::isnan(numbers.accuracy));
  EXPECT_TRUE(std::isnan(numbers.exposed_ms) && std::isnan(numbers.exposed_ratio));
  EXPECT_DOUBLE_EQ(numbers.predictions_per_second, 60);
}

TEST(StepNumbersTest, AClockThatStandsStillGivesNoSpeed) {
  StepFacts facts = Facts();
  facts.took = absl::ZeroDuration();
  const StepNumbers numbers = NumbersOf(facts, 1);
  EXPECT_TRUE(std::isnan(numbers.predictions_per_second) && std::isnan(numbers.exposed_ratio));
  EXPECT_EQ(numbers.exposed_ms, 50);
}

TEST(StepNumbersTest, BitsAreBinary) {
  EXPECT_DOUBLE_EQ(BitsOf(std::log(256)), 8);
  EXPECT_EQ(BitsOf(0), 0);
}

}  // namespace
}  // namespace evenkeel
