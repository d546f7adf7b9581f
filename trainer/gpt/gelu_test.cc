#include "evenkeel/trainer/gpt/gelu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

template <typename T>
class GeluTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(GeluTest, Types);

TYPED_TEST(GeluTest, AgreesWithPyTorch) {
  using T = TypeParam;
  const Recorded recorded("layers");
  const std::vector<T> input = recorded.Get<T>("gelu.input"),
                       diff = recorded.Get<T>("gelu.diff_output");
  std::vector<T> output(input.size()), diff_input(input.size());
  GeluForward<T, T>(input.size(), input.data(), output.data());
  GeluBackward<T, T>(input.size(), input.data(), diff.data(), diff_input.data());
  EXPECT_LT(Difference<T>(output, recorded.Get<double>("gelu.output")), kRounding<T>);
  EXPECT_LT(Difference<T>(diff_input, recorded.Get<double>("gelu.diff_input")), kRounding<T>);
}

TEST(GeluGradientTest, MatchesDifferences) {
  std::vector<double> input = RandomValues<double>(37, 1, 5);
  const std::vector<double> diff = RandomValues<double>(37, 2);
  std::vector<double> output(37), diff_input = diff;
  const auto objective = [&] {
    GeluForward<double, double>(37, input.data(), output.data());
    return WeightedSum<double>(output, diff);
  };
  GeluBackward<double, double>(37, input.data(), diff_input.data(), diff_input.data());
  EXPECT_LT(RelativeError<double>(diff_input, NumericGradient<double>(input, 1e-5, objective)),
            1e-8);
}

TEST(GeluForwardTest, IsFiniteAndRightForEveryFiniteInput) {
  const std::vector<float> input = {-3e38f, -1e20f, -100, -14,   -0.0f, 0,
                                    1e-30f, 14,     100,  1e20f, 3e38f};
  const std::vector<float> ones(input.size(), 1);
  std::vector<float> output(input.size()), derivative(input.size());
  GeluForward<float, float>(input.size(), input.data(), output.data());
  GeluBackward<float, float>(input.size(), input.data(), ones.data(), derivative.data());
  for (size_t i = 0; i < input.size(); ++i) {
    const double expected = std::abs(input[i]) > 10 ? std::max(0.0f, input[i]) : input[i] / 2;
    EXPECT_NEAR(output[i], expected, std::abs(expected) * 1e-6) << input[i];
    EXPECT_NEAR(derivative[i], std::abs(input[i]) > 10 ? input[i] > 0 : 0.5, 1e-6) << input[i];
  }
}

TEST(GeluForwardTest, BFloat16IsTheRoundedFloat) {
  const std::vector<float> input = RandomValues<float>(100, 1, 4);
  std::vector<float> exact(100);
  std::vector<BFloat16> output(100);
  GeluForward<float, float>(100, input.data(), exact.data());
  GeluForward<float, BFloat16>(100, input.data(), output.data());
  for (int i = 0; i < 100; ++i) EXPECT_EQ(output[i].bits, BFloat16(exact[i]).bits);
}

}  // namespace
}  // namespace evenkeel
