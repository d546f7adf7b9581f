#include "evenkeel/trainer/gpt/strided_product.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/gpt/vector_math.h"

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

}  // namespace
}  // namespace evenkeel
