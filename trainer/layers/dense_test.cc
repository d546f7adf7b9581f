#include "evenkeel/trainer/layers/dense.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

template <typename T>
std::vector<T> Random(int64_t count, uint64_t seed) {
  StableRandom random(seed);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(2 * random.Uniform() - 1);
  return values;
}

constexpr DenseShape kShapes[] = {
    {.batch = 1, .inputs = 1, .outputs = 1},
    {.batch = 3, .inputs = 7, .outputs = 5},
    {.batch = 17, .inputs = 32, .outputs = 10},
};

template <typename T>
class DenseTest : public testing::Test {
 protected:
  // The layer is linear: only rounding separates differences from derivatives.
  static constexpr double kTolerance = std::is_same_v<T, float> ? 1e-3 : 1e-8;
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(DenseTest, Types);

TYPED_TEST(DenseTest, ComputesInputTimesWeightPlusBias) {
  using T = TypeParam;
  const std::vector<T> input = {1, 2, 3, 4, 5, 6};    // [2, 3]
  const std::vector<T> weight = {1, 0, -1, 2, 1, 0};  // [2, 3]
  const std::vector<T> bias = {10, 20};
  std::vector<T> output(4, 99);
  MatrixProducts<T> products;
  ASSERT_TRUE(DenseForward(products, {2, 3, 2}, Activation::kNone, input.data(), weight.data(),
                           bias.data(), output.data())
                  .ok());
  EXPECT_EQ(output, (std::vector<T>{8, 24, 8, 33}));
}

TYPED_TEST(DenseTest, RectifiesWhenAsked) {
  using T = TypeParam;
  const std::vector<T> input = {1, -3};   // [2, 1]
  const std::vector<T> weight = {2, -1};  // [2, 1]
  const std::vector<T> bias = {1, 0.5};
  std::vector<T> output(4, 99);
  MatrixProducts<T> products;
  ASSERT_TRUE(DenseForward(products, {2, 1, 2}, Activation::kRelu, input.data(), weight.data(),
                           bias.data(), output.data())
                  .ok());
  EXPECT_EQ(output, (std::vector<T>{3, 0, 0, 3.5}));
}

TYPED_TEST(DenseTest, GradientsMatchDifferences) {
  using T = TypeParam;
  MatrixProducts<T> products;
  for (const DenseShape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.batch << " " << shape.inputs << " " << shape.outputs);
    std::vector<T> input = Random<T>(shape.batch * shape.inputs, 1);
    std::vector<T> weight = Random<T>(shape.outputs * shape.inputs, 2);
    std::vector<T> bias = Random<T>(shape.outputs, 3);
    const std::vector<T> diff_output = Random<T>(shape.batch * shape.outputs, 4);
    std::vector<T> output(diff_output.size());
    const auto objective = [&] {
      EXPECT_TRUE(DenseForward(products, shape, Activation::kNone, input.data(), weight.data(),
                               bias.data(), output.data())
                      .ok());
      return WeightedSum<T>(output, diff_output);
    };
    std::vector<T> diff_bias(bias.size(), 77), diff_weight(weight.size(), 77),
        diff_input(input.size(), 77);
    SumRows<T, T>(shape.batch, shape.outputs, diff_output.data(), {diff_bias.data()});
    ASSERT_TRUE(DenseBackwardWeight<T>(products, shape, input.data(), diff_output.data(),
                                       {diff_weight.data()})
                    .ok());
    ASSERT_TRUE(
        DenseBackwardInput<T>(products, shape, weight.data(), diff_output.data(), diff_input.data())
            .ok());

    EXPECT_LT(RelativeError<T>(diff_bias, NumericGradient<T>(bias, 0.5, objective)),
              this->kTolerance);
    EXPECT_LT(RelativeError<T>(diff_weight, NumericGradient<T>(weight, 0.5, objective)),
              this->kTolerance);
    EXPECT_LT(RelativeError<T>(diff_input, NumericGradient<T>(input, 0.5, objective)),
              this->kTolerance);
  }
}

TYPED_TEST(DenseTest, AddsWhenAsked) {
  using T = TypeParam;
  const DenseShape shape{.batch = 2, .inputs = 3, .outputs = 1};
  const std::vector<T> input = {1, 2, 3, 4, 5, 6};
  const std::vector<T> diff_output = {1, 2};
  std::vector<T> weight = {100, 100, 100};
  std::vector<T> bias = {100};
  MatrixProducts<T> products;
  SumRows<T, T>(shape.batch, shape.outputs, diff_output.data(), {.data = bias.data(), .add = true});
  ASSERT_TRUE(DenseBackwardWeight<T>(products, shape, input.data(), diff_output.data(),
                                     {.data = weight.data(), .add = true})
                  .ok());
  EXPECT_EQ(bias, (std::vector<T>{103}));
  EXPECT_EQ(weight, (std::vector<T>{109, 112, 115}));
}

}  // namespace
}  // namespace evenkeel
