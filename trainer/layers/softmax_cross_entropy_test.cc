#include "evenkeel/trainer/layers/softmax_cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

TEST(SoftmaxCrossEntropyTest, EqualScoresCostTheLogarithmOfTheClasses) {
  const std::vector<float> scores(2 * 10, 3.5f);
  const std::vector<uint8_t> labels = {0, 9};
  const LossResult loss = SoftmaxCrossEntropy<float>(scores, labels, {});
  EXPECT_NEAR(loss.sum, 2 * std::log(10.0), 1e-12);
  EXPECT_EQ(loss.correct, 1);  // The first of equal scores counts.
}

TEST(SoftmaxCrossEntropyTest, HugeScoresAreSafe) {
  const std::vector<float> scores = {3e38f, -3e38f, 0};
  const std::vector<uint8_t> labels = {0};
  std::vector<float> diff(3);
  EXPECT_EQ(SoftmaxCrossEntropy<float>(scores, labels, diff).sum, 0);
  EXPECT_EQ(diff, (std::vector<float>{0, 0, 0}));
}

TEST(SoftmaxCrossEntropyTest, GradientOfTheMeanMatchesDifferences) {
  std::vector<double> scores = {0.1, -2, 0.7, 1.5, 1.4, -0.3};
  const std::vector<uint8_t> labels = {2, 0};
  std::vector<double> diff(6);
  SoftmaxCrossEntropy<double>(scores, labels, diff);
  const auto numeric = NumericGradient<double>(
      scores, 1e-4, [&] { return SoftmaxCrossEntropy<double>(scores, labels, {}).sum / 2; });
  EXPECT_LT(RelativeError<double>(diff, numeric), 1e-7);
}

TEST(SoftmaxCrossEntropyTest, GradientMayTakeTheScoresPlace) {
  std::vector<double> scores = {0.1, -2, 0.7, 1.5, 1.4, -0.3};
  const std::vector<uint8_t> labels = {2, 0};
  std::vector<double> apart(6);
  const LossResult expected = SoftmaxCrossEntropy<double>(scores, labels, apart);
  EXPECT_EQ(SoftmaxCrossEntropy<double>(scores, labels, scores).sum, expected.sum);
  EXPECT_EQ(scores, apart);
}

}  // namespace
}  // namespace evenkeel
