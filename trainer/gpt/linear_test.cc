#include "evenkeel/trainer/gpt/linear.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "evenkeel/trainer/gpt/rows.h"
#include "evenkeel/trainer/gpt/strided_product.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

template <typename T>
class LinearTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(LinearTest, Types);

TYPED_TEST(LinearTest, AgreesWithPyTorch) {
  using T = TypeParam;
  const Recorded recorded("layers");
  const std::vector<T> input = recorded.Get<T>("linear.input"),
                       weight = recorded.Get<T>("linear.weight");
  const std::vector<T> bias = recorded.Get<T>("linear.bias"),
                       diff = recorded.Get<T>("linear.diff_output");
  const LinearShape shape{.rows = 6, .inputs = 5, .outputs = 7};
  StridedProducts<T> products;
  // Old values in the results are overwritten, the second time added to.
  std::vector<T> output(diff.size(), 99), diff_input(input.size(), 99),
      diff_weight(weight.size(), 99);
  std::vector<T> diff_bias(bias.size(), 99);
  ASSERT_TRUE(
      LinearForward(products, shape, input.data(), weight.data(), bias.data(), output.data()).ok());
  ASSERT_TRUE(
      LinearBackwardInput(products, shape, weight.data(), diff.data(), diff_input.data()).ok());
  EXPECT_LT(Difference<T>(output, recorded.Get<double>("linear.output")), kRounding<T>);
  EXPECT_LT(Difference<T>(diff_input, recorded.Get<double>("linear.diff_input")), kRounding<T>);
  for (int times = 1; times <= 2; ++times) {
    const bool adds = times == 2;
    const GradTarget<T> target = {diff_weight.data(), adds};
    ASSERT_TRUE(LinearBackwardWeight(products, shape, input.data(), diff.data(), target).ok());
    SumRows<T, T>(6, 7, diff.data(), {diff_bias.data(), adds});
    std::vector<double> of_weight = recorded.Get<double>("linear.diff_weight");
    std::vector<double> of_bias = recorded.Get<double>("linear.diff_bias");
    for (double& element : of_weight) element *= times;
    for (double& element : of_bias) element *= times;
    EXPECT_LT(Difference<T>(diff_weight, of_weight), kRounding<T>) << times;
    EXPECT_LT(Difference<T>(diff_bias, of_bias), kRounding<T>) << times;
  }
}

TEST(LinearGradientTest, MatchesDifferences) {
  const LinearShape shape{.rows = 3, .inputs = 4, .outputs = 2};
  std::vector<double> input = RandomValues<double>(12, 1), weight = RandomValues<double>(8, 2);
  const std::vector<double> diff = RandomValues<double>(6, 3);
  std::vector<double> output(6), diff_input(12), diff_weight(8);
  StridedProducts<double> products;
  const auto objective = [&] {
    EXPECT_TRUE(
        LinearForward(products, shape, input.data(), weight.data(), nullptr, output.data()).ok());
    return WeightedSum<double>(output, diff);
  };
  ASSERT_TRUE(
      LinearBackwardInput(products, shape, weight.data(), diff.data(), diff_input.data()).ok());
  ASSERT_TRUE((LinearBackwardWeight<double, double>(products, shape, input.data(), diff.data(),
                                                    {diff_weight.data()}))
                  .ok());
  EXPECT_LT(RelativeError<double>(diff_input, NumericGradient<double>(input, 0.5, objective)),
            1e-12);
  EXPECT_LT(RelativeError<double>(diff_weight, NumericGradient<double>(weight, 0.5, objective)),
            1e-12);
}

}  // namespace
}  // namespace evenkeel
