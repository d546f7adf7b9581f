#include "evenkeel/trainer/layers/strided_shape.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/data/stable_random.h"
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

// A layer whose weight lies as [outputs, inputs].
struct Layer {
  int64_t batch, inputs, outputs;
};
constexpr Layer kLayers[] = {{1, 1, 1}, {3, 7, 5}, {4, 3, 1}, {17, 32, 10}};

template <typename T>
class LinearShapeTest : public testing::Test {
 protected:
  // The layer is linear: only rounding separates differences from derivatives.
  static constexpr double kTolerance = std::is_same_v<T, float> ? 1e-3 : 1e-8;
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(LinearShapeTest, Types);

TYPED_TEST(LinearShapeTest, ComputesInputTimesWeightPlusBias) {
  using T = TypeParam;
  const std::vector<T> input = {1, 2, 3, 4, 5, 6};    // [2, 3]
  const std::vector<T> weight = {1, 0, -1, 2, 1, 0};  // [2, 3]
  const std::vector<T> bias = {10, 20};
  std::vector<T> output(4, 99);
  MatrixProducts<T> products;
  ASSERT_TRUE(products
                  .Run(LinearShape::FromOutputs(2, 3, 2).BackwardInput(), input.data(),
                       weight.data(), bias.data(), output.data())
                  .ok());
  EXPECT_EQ(output, (std::vector<T>{8, 24, 8, 33}));
}

TYPED_TEST(LinearShapeTest, RectifiesWhenAsked) {
  using T = TypeParam;
  const std::vector<T> input = {1, -3};   // [2, 1]
  const std::vector<T> weight = {2, -1};  // [2, 1]
  const std::vector<T> bias = {1, 0.5};
  std::vector<T> output(4, 99);
  MatrixProducts<T> products;
  ASSERT_TRUE(products
                  .Run(LinearShape::FromOutputs(2, 1, 2).BackwardInput(), input.data(),
                       weight.data(), bias.data(), output.data(), Activation::kRelu)
                  .ok());
  EXPECT_EQ(output, (std::vector<T>{3, 0, 0, 3.5}));
}

TYPED_TEST(LinearShapeTest, GradientsMatchDifferences) {
  using T = TypeParam;
  MatrixProducts<T> products;
  for (const auto& [batch, inputs, outputs] : kLayers) {
    SCOPED_TRACE(testing::Message() << batch << " " << inputs << " " << outputs);
    const LinearShape shape = LinearShape::FromOutputs(batch, inputs, outputs);
    std::vector<T> input = Random<T>(batch * inputs, 1);
    std::vector<T> weight = Random<T>(outputs * inputs, 2);
    std::vector<T> bias = Random<T>(outputs, 3);
    const std::vector<T> diff_output = Random<T>(batch * outputs, 4);
    std::vector<T> output(diff_output.size());
    const auto objective = [&] {
      const absl::Status status = products.Run(shape.BackwardInput(), input.data(), weight.data(),
                                               bias.data(), output.data());
      EXPECT_TRUE(status.ok()) << status;
      return WeightedSum<T>(output, diff_output);
    };
    std::vector<T> diff_bias(bias.size(), 77), diff_weight(weight.size(), 77),
        diff_input(input.size(), 77);
    SumRows<T, T>(shape.rows, shape.inputs, diff_output.data(), {diff_bias.data()});
    ASSERT_TRUE(products
                    .Run(shape.BackwardWeight(/*add=*/false), diff_output.data(), input.data(),
                         nullptr, diff_weight.data())
                    .ok());
    ASSERT_TRUE(
        products.Run(shape.Forward(), diff_output.data(), weight.data(), nullptr, diff_input.data())
            .ok());

    EXPECT_LT(RelativeError<T>(diff_bias, NumericGradient<T>(bias, 0.5, objective)),
              this->kTolerance);
    EXPECT_LT(RelativeError<T>(diff_weight, NumericGradient<T>(weight, 0.5, objective)),
              this->kTolerance);
    EXPECT_LT(RelativeError<T>(diff_input, NumericGradient<T>(input, 0.5, objective)),
              this->kTolerance);
  }
}

TYPED_TEST(LinearShapeTest, AddsWhenAsked) {
  using T = TypeParam;
  const LinearShape shape = LinearShape::FromOutputs(/*rows=*/2, /*inputs=*/3, /*outputs=*/1);
  const std::vector<T> input = {1, 2, 3, 4, 5, 6};
  const std::vector<T> diff_output = {1, 2};
  std::vector<T> weight = {100, 100, 100};
  std::vector<T> bias = {100};
  MatrixProducts<T> products;
  SumRows<T, T>(shape.rows, shape.inputs, diff_output.data(), {.data = bias.data(), .add = true});
  ASSERT_TRUE(products
                  .Run(shape.BackwardWeight(/*add=*/true), diff_output.data(), input.data(),
                       nullptr, weight.data())
                  .ok());
  EXPECT_EQ(bias, (std::vector<T>{103}));
  EXPECT_EQ(weight, (std::vector<T>{109, 112, 115}));
}

}  // namespace
}  // namespace evenkeel
