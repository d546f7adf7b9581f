#include "evenkeel/trainer/gpt/layer_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

template <typename T>
class LayerNormTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(LayerNormTest, Types);

TYPED_TEST(LayerNormTest, AgreesWithPyTorch) {
  using T = TypeParam;
  const Recorded recorded("layers");
  const std::vector<T> input = recorded.Get<T>("layer_norm.input"),
                       weight = recorded.Get<T>("layer_norm.weight");
  const std::vector<T> bias = recorded.Get<T>("layer_norm.bias"),
                       diff = recorded.Get<T>("layer_norm.diff_output");
  const int64_t width = weight.size(), rows = input.size() / width;
  std::vector<T> output(input.size()), mean(rows), inverse(rows), diff_weight(width),
      diff_bias(width);
  std::vector<T> diff_input(input.size());
  const RowStatistics<T> statistics = {mean.data(), inverse.data()};
  LayerNormForward(rows, width, input.data(), weight.data(), bias.data(), output.data(),
                   statistics);
  LayerNormBackward(rows, width, input.data(), statistics, weight.data(), diff.data(),
                    diff_weight.data(), diff_bias.data(), diff_input.data());
  EXPECT_LT(Difference<T>(output, recorded.Get<double>("layer_norm.output")), kRounding<T>);
  EXPECT_LT(Difference<T>(diff_input, recorded.Get<double>("layer_norm.diff_input")), kRounding<T>);
  EXPECT_LT(Difference<T>(diff_weight, recorded.Get<double>("layer_norm.diff_weight")),
            kRounding<T>);
  EXPECT_LT(Difference<T>(diff_bias, recorded.Get<double>("layer_norm.diff_bias")), kRounding<T>);
}

TEST(LayerNormGradientTest, MatchesDifferencesAndIsAddedToTheInputs) {
  for (const int64_t width : {1, 2, 17, 33}) {
    SCOPED_TRACE(width);
    constexpr int64_t kRows = 3;
    std::vector<double> input = RandomValues<double>(kRows * width, 1),
                        weight = RandomValues<double>(width, 2);
    std::vector<double> bias = RandomValues<double>(width, 3);
    const std::vector<double> diff = RandomValues<double>(kRows * width, 4);
    std::vector<double> output(input.size()), mean(kRows), inverse(kRows), diff_weight(width, 9),
        diff_bias(width, 9);
    std::vector<double> diff_input(input.size(), 100);
    const RowStatistics<double> statistics = {mean.data(), inverse.data()};
    const auto objective = [&] {
      LayerNormForward(kRows, width, input.data(), weight.data(), bias.data(), output.data(),
                       statistics);
      return WeightedSum<double>(output, diff);
    };
    objective();
    LayerNormBackward(kRows, width, input.data(), statistics, weight.data(), diff.data(),
                      diff_weight.data(), diff_bias.data(), diff_input.data());
    for (double& element : diff_input) element -= 100;
    // A row of one is its own mean: the output does not depend on it.
    if (width > 1) {
      EXPECT_LT(RelativeError<double>(diff_input, NumericGradient<double>(input, 1e-5, objective)),
                1e-6);
      EXPECT_LT(RelativeError<double>(diff_weight, NumericGradient<double>(weight, 0.5, objective)),
                1e-9);
    } else {
      EXPECT_LT(std::abs(diff_input[0]), 1e-9);
    }
    EXPECT_LT(RelativeError<double>(diff_bias, NumericGradient<double>(bias, 0.5, objective)),
              1e-9);
  }
}

TEST(LayerNormGradientTest, OfTheInputIsLeftOutWhereItIsNotWanted) {
  const std::vector<float> input = {1, 2, 3, 5}, weight = {1, 2}, diff = {1, 2, 3, 4};
  std::vector<float> output(4), mean(2), inverse(2), diff_weight(2), diff_bias(2);
  LayerNormForward(2, 2, input.data(), weight.data(), weight.data(), output.data(),
                   RowStatistics<float>{mean.data(), inverse.data()});
  LayerNormBackward<float>(2, 2, input.data(), {mean.data(), inverse.data()}, weight.data(),
                           diff.data(), diff_weight.data(), diff_bias.data(), nullptr);
  EXPECT_EQ(diff_bias, (std::vector<float>{4, 6}));
}

TEST(LayerNormForwardTest, ALargeMeanCostsNoPrecision) {
  // The elements are exact; a variance as the mean of squares less the square of the mean would be
  // off by 1e3.
  const std::vector<float> input = {1e5f, 1e5f + 1, 1e5f + 2, 1e5f + 3}, ones(4, 1.0f), zeros(4);
  std::vector<float> output(4), mean(1), inverse(1);
  LayerNormForward(1, 4, input.data(), ones.data(), zeros.data(), output.data(),
                   RowStatistics<float>{mean.data(), inverse.data()});
  EXPECT_NEAR(output[3], 1.5 / std::sqrt(1.25), 1e-4);
}

}  // namespace
}  // namespace evenkeel
