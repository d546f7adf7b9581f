#include "evenkeel/trainer/gpt/strided_product.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/layers/vector_math.h"

// Runs a second time as strided_product_plain_test, with oneDNN told to use AVX2 at most, where it
// has no bfloat16.

namespace evenkeel {
namespace {

template <typename Operand>
std::vector<Operand> Operands(int64_t count, uint64_t seed) {
  std::vector<Operand> operands;
  for (float value : RandomValues<float>(count, seed)) {
    operands.push_back(Narrow<Operand>(static_cast<typename StridedProducts<Operand>::Sum>(value)));
  }
  return operands;
}

template <typename Operand>
class StridedProductTest : public testing::Test {};
using Types = testing::Types<float, BFloat16, double>;
TYPED_TEST_SUITE(StridedProductTest, Types);

// Heads side by side in wider rows, both factors seen as their transposes or not, with what an
// epilogue can add.
TYPED_TEST(StridedProductTest, IsTheSumOfItsDefinition) {
  using Operand = TypeParam;
  using Sum = typename StridedProducts<Operand>::Sum;
  StridedProducts<Operand> products;
  for (const int64_t heads : {1, 3}) {
    for (const int flags : {0, 1, 2, 3, 4, 5, 8, 9, 12, 15}) {
      const bool left_transposed = flags & 1, right_transposed = flags & 2, adds = flags & 4,
                 has_bias = flags & 8;
      SCOPED_TRACE(testing::Message() << heads << " heads, flags " << flags);
      StridedShape shape{.outer = heads == 1 ? 1 : 2,
                         .heads = heads,
                         .rows = 5,
                         .columns = 7,
                         .inner = 9,
                         .add = adds};
      const int64_t left_row = left_transposed ? 5 : 9, right_row = right_transposed ? 9 : 7;
      shape.left = {.outer = 45 * heads, .head = left_row, .row = left_row * heads};
      shape.right = {.outer = 63 * heads, .head = right_row, .row = right_row * heads};
      shape.output = {.outer = 35 * heads, .head = 7, .row = 7 * heads};
      if (left_transposed) std::swap(shape.left.row, shape.left.column);
      if (right_transposed) std::swap(shape.right.row, shape.right.column);
      const std::vector<Operand> left = Operands<Operand>(2 * heads * 45, 1),
                                 right = Operands<Operand>(2 * heads * 63, 2);
      const std::vector<Sum> bias = RandomValues<Sum>(7, 3);
      std::vector<Sum> output = RandomValues<Sum>(2 * heads * 35, 4);
      std::vector<double> expected(output.begin(), output.end());
      for (int64_t outer = 0; outer < shape.outer; ++outer) {
        for (int64_t head = 0; head < heads; ++head) {
          const auto at = [&](const MatrixStrides& s, int64_t r, int64_t c) {
            return outer * s.outer + head * s.head + r * s.row + c * s.column;
          };
          for (int64_t r = 0; r < 5; ++r) {
            for (int64_t c = 0; c < 7; ++c) {
              double sum = (adds ? expected[at(shape.output, r, c)] : 0) + (has_bias ? bias[c] : 0);
              for (int64_t i = 0; i < 9; ++i) {
                sum += static_cast<double>(Widen(left[at(shape.left, r, i)])) *
                       Widen(right[at(shape.right, i, c)]);
              }
              expected[at(shape.output, r, c)] = sum;
            }
          }
        }
      }
      const absl::Status status = products.Run(shape, left.data(), right.data(),
                                               has_bias ? bias.data() : nullptr, output.data());
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_LT(Difference<Sum>(output, expected), kRounding<Sum>);
    }
  }
}

TEST(StridedProductBFloat16Test, ResultsInBFloat16AreRoundedOnce) {
  StridedProducts<BFloat16> products;
  const std::vector<BFloat16> left = Operands<BFloat16>(16 * 32, 1),
                              right = Operands<BFloat16>(32 * 48, 2);
  const StridedShape shape{.rows = 16,
                           .columns = 48,
                           .inner = 32,
                           .left = {.row = 32},
                           .right = {.row = 48},
                           .output = {.row = 48}};
  std::vector<float> exact(16 * 48);
  std::vector<BFloat16> rounded(16 * 48);
  ASSERT_TRUE(products.Run(shape, left.data(), right.data(), nullptr, exact.data()).ok());
  ASSERT_TRUE(products.Run(shape, left.data(), right.data(), nullptr, rounded.data()).ok());
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_EQ(rounded[i].bits, BFloat16(exact[i]).bits);
}

template <typename T>
class LinearTest : public testing::Test {};
using LinearTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(LinearTest, LinearTypes);

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
      products.Run(shape.Forward(), input.data(), weight.data(), bias.data(), output.data()).ok());
  ASSERT_TRUE(
      products.Run(shape.BackwardInput(), diff.data(), weight.data(), nullptr, diff_input.data())
          .ok());
  EXPECT_LT(Difference<T>(output, recorded.Get<double>("linear.output")), kRounding<T>);
  EXPECT_LT(Difference<T>(diff_input, recorded.Get<double>("linear.diff_input")), kRounding<T>);
  for (int times = 1; times <= 2; ++times) {
    const bool adds = times == 2;
    ASSERT_TRUE(
        products
            .Run(shape.BackwardWeight(adds), input.data(), diff.data(), nullptr, diff_weight.data())
            .ok());
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
        products.Run(shape.Forward(), input.data(), weight.data(), nullptr, output.data()).ok());
    return WeightedSum<double>(output, diff);
  };
  ASSERT_TRUE(
      products.Run(shape.BackwardInput(), diff.data(), weight.data(), nullptr, diff_input.data())
          .ok());
  ASSERT_TRUE(products
                  .Run(shape.BackwardWeight(/*add=*/false), input.data(), diff.data(), nullptr,
                       diff_weight.data())
                  .ok());
  EXPECT_LT(RelativeError<double>(diff_input, NumericGradient<double>(input, 0.5, objective)),
            1e-12);
  EXPECT_LT(RelativeError<double>(diff_weight, NumericGradient<double>(weight, 0.5, objective)),
            1e-12);
}

}  // namespace
}  // namespace evenkeel
