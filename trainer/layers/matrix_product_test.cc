#include "evenkeel/trainer/layers/matrix_product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {
namespace {

template <typename T>
std::vector<T> Random(int64_t count, uint64_t seed) {
  StableRandom random(seed);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(2 * random.Uniform() - 1);
  return values;
}

// Written down from the header, in double.
template <typename T>
std::vector<double> Expected(const StridedShape& s, Activation then, const std::vector<T>& left,
                             const std::vector<T>& right, const std::vector<T>& bias,
                             const std::vector<T>& before) {
  std::vector<double> output(before.begin(), before.end());
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t column = 0; column < s.columns; ++column) {
      double sum = 0;
      for (int64_t i = 0; i < s.inner; ++i) {
        const double a = left[row * s.left.row + i * s.left.column];
        const double b = right[i * s.right.row + column * s.right.column];
        sum += a * b;
      }
      double& to = output[row * s.columns + column];
      if (s.add) sum += to;
      if (!bias.empty()) sum += bias[column];
      to = then == Activation::kRelu ? std::max(0.0, sum) : sum;
    }
  }
  return output;
}

template <typename T>
class MatrixProductTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(MatrixProductTest, Types);

TYPED_TEST(MatrixProductTest, EveryShapeAndEndIsTheSumOfItsDefinition) {
  using T = TypeParam;
  const double tolerance = std::is_same_v<T, float> ? 2e-5 : 1e-13;
  const struct {
    int64_t rows, columns, inner;
  } kSizes[] = {{1, 1, 1}, {3, 5, 1}, {1, 5, 7}, {3, 1, 7}, {3, 5, 7}, {64, 10, 33}, {17, 40, 129}};
  const struct {
    bool add, has_bias;
    Activation then;
  } kEnds[] = {{false, false, Activation::kNone},
               {true, false, Activation::kNone},
               {false, true, Activation::kNone},
               {false, true, Activation::kRelu}};
  MatrixProducts<T> products;
  for (const auto& size : kSizes) {
    const std::vector<T> left = Random<T>(size.rows * size.inner, 1);
    const std::vector<T> right = Random<T>(size.inner * size.columns, 2);
    const std::vector<T> values = Random<T>(size.columns, 3);
    for (const bool turns_left : {false, true}) {
      for (const bool turns_right : {false, true}) {
        for (const auto& [add, has_bias, then] : kEnds) {
          const StridedShape shape{.rows = size.rows,
                                   .columns = size.columns,
                                   .inner = size.inner,
                                   .left = turns_left ? MatrixStrides{.row = 1, .column = size.rows}
                                                      : MatrixStrides{.row = size.inner},
                                   .right = turns_right
                                                ? MatrixStrides{.row = 1, .column = size.inner}
                                                : MatrixStrides{.row = size.columns},
                                   .output = {.row = size.columns},
                                   .add = add};
          SCOPED_TRACE(testing::Message()
                       << size.rows << "x" << size.columns << "x" << size.inner << " " << turns_left
                       << turns_right << " " << add << has_bias << static_cast<int>(then));
          const std::vector<T> before = Random<T>(size.rows * size.columns, 4);
          const std::vector<T> bias = has_bias ? values : std::vector<T>();
          std::vector<T> output = before;
          const absl::Status status =
              products.Run(shape, left.data(), right.data(), has_bias ? bias.data() : nullptr,
                           output.data(), then);
          ASSERT_TRUE(status.ok()) << status;
          const std::vector<double> expected = Expected(shape, then, left, right, bias, before);
          for (size_t i = 0; i < output.size(); ++i)
            ASSERT_NEAR(output[i], expected[i], tolerance) << i;
        }
      }
    }
  }
}

TYPED_TEST(MatrixProductTest, ManyShapesComeAndGo) {
  using T = TypeParam;
  MatrixProducts<T> products;
  for (int round = 0; round < 2; ++round) {
    for (int64_t inner = 1; inner <= 100; ++inner) {
      const std::vector<T> ones(inner, T{1});
      T output = -1;
      ASSERT_TRUE(products
                      .Run({.rows = 1,
                            .columns = 1,
                            .inner = inner,
                            .left = {.row = inner},
                            .right = {.row = 1},
                            .output = {.row = 1}},
                           ones.data(), ones.data(), nullptr, &output)
                      .ok());
      EXPECT_EQ(output, static_cast<T>(inner));
    }
  }
}

}  // namespace
}  // namespace evenkeel
