#include "evenkeel/trainer/layers/token_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

template <typename T>
class TokenLossTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(TokenLossTest, Types);

TYPED_TEST(TokenLossTest, AgreesWithPyTorchInPlaceAndNot) {
  using T = TypeParam;
  const Recorded recorded("layers");
  const std::vector<int32_t> targets = recorded.Get<int32_t>("loss.targets");
  const std::vector<double> mean = recorded.Get<double>("loss.mean");
  for (const bool in_place : {false, true}) {
    std::vector<T> scores = recorded.Get<T>("loss.scores"), diff(scores.size());
    T* to = in_place ? scores.data() : diff.data();
    const TokenLossResult loss = TokenLoss(37, scores.data(), targets, 1.0 / 9, to);
    EXPECT_NEAR(loss.sum / 9, mean[0], mean[0] * kRounding<T>);
    EXPECT_LT(Difference<T>(std::span(to, diff.size()), recorded.Get<double>("loss.diff_scores")),
              kRounding<T>);
  }
}

TYPED_TEST(TokenLossTest, LeavesTheScoresAloneWithoutAGradient) {
  using T = TypeParam;
  std::vector<T> scores = RandomValues<T>(3 * 1500, 1, 5);
  const std::vector<T> before = scores;
  const std::vector<int32_t> targets = {0, 1499, 3};
  const TokenLossResult evaluated = TokenLoss<T, T>(1500, scores.data(), targets, 1, nullptr);
  EXPECT_EQ(scores, before);
  EXPECT_EQ(TokenLoss(1500, scores.data(), targets, 1, scores.data()).sum, evaluated.sum);
}

TYPED_TEST(TokenLossTest, IsSafeForAnyFiniteScores) {
  using T = TypeParam;
  std::vector<T> scores = {3e38f, -3e38f, 0, -3e38f, -3e38f, -3e38f, 1e4f, 1e4f, 0};
  const std::vector<int32_t> targets = {0, 2, 2};
  std::vector<T> diff(9);
  const TokenLossResult loss = TokenLoss(3, scores.data(), targets, 1, diff.data());
  EXPECT_NEAR(loss.sum, 0 + std::log(3.0) + 1e4 + std::log(2.0), 1e-2);
  EXPECT_EQ(loss.correct, 1);
  const std::vector<double> expected = {0, 0, 0, 1.0 / 3, 1.0 / 3, -2.0 / 3, 0.5, 0.5, -1};
  EXPECT_LT(Difference<T>(diff, expected), 1e-6);
}

TYPED_TEST(TokenLossTest, CountsTheFirstHighestScore) {
  using T = TypeParam;
  std::vector<T> scores = {1, 2, 2, 1, 2, 2, 5, 0, 0};
  const std::vector<int32_t> targets = {1, 2, 0};
  EXPECT_EQ((TokenLoss<T, T>(3, scores.data(), targets, 1, nullptr).correct), 2);
}

TYPED_TEST(TokenLossTest, EqualScoresCostTheLogarithmOfTheClasses) {
  using T = TypeParam;
  std::vector<T> scores(2 * 10, T{3.5});
  const std::vector<uint8_t> labels = {0, 9};
  const TokenLossResult loss = TokenLoss<T, T, uint8_t>(10, scores.data(), labels, 1, nullptr);
  EXPECT_NEAR(loss.sum, 2 * std::log(10.0), 1e-12);
  EXPECT_EQ(loss.correct, 1);  // The first of equal scores counts.
}

TYPED_TEST(TokenLossTest, LabelsAreTargetsOfAnotherType) {
  using T = TypeParam;
  const std::vector<uint8_t> labels = {2, 0, 9};
  const std::vector<int32_t> targets(labels.begin(), labels.end());
  std::vector<T> scores = RandomValues<T>(3 * 10, 1, 5), same = scores;
  const TokenLossResult loss =
      TokenLoss<T, T, uint8_t>(10, scores.data(), labels, 0.5, scores.data());
  const TokenLossResult expected = TokenLoss<T, T>(10, same.data(), targets, 0.5, same.data());
  EXPECT_EQ(loss.sum, expected.sum);
  EXPECT_EQ(loss.correct, expected.correct);
  EXPECT_EQ(scores, same);
}

TEST(TokenLossGradientTest, MatchesDifferences) {
  std::vector<double> scores = RandomValues<double>(5 * 7, 1, 3);
  const std::vector<int32_t> targets = {0, 6, 3, 3, 1};
  std::vector<double> used = scores;
  TokenLoss(7, used.data(), targets, 2.5, used.data());
  const auto objective = [&] {
    return 2.5 * TokenLoss<double, double>(7, scores.data(), targets, 1, nullptr).sum;
  };
  EXPECT_LT(RelativeError<double>(used, NumericGradient<double>(scores, 1e-5, objective)), 1e-8);
}

}  // namespace
}  // namespace evenkeel
