#include "evenkeel/trainer/layers/rows.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

TEST(RowsTest, ReluGradientPassesWhereTheOutputIsPositive) {
  const std::vector<double> output = {0, 0.5, 3};
  std::vector<double> diff = {7, 8, 9};
  ReluBackward<double>(output, diff);
  EXPECT_EQ(diff, (std::vector<double>{0, 8, 9}));
}

template <typename T, typename O>
void CheckSumOfRows() {
  constexpr int64_t kRows = 7, kColumns = 19;
  std::vector<O> matrix;
  for (int64_t i = 0; i < kRows * kColumns; ++i)
    matrix.push_back(static_cast<O>(static_cast<float>(i % 11 - 5)));
  for (const bool add : {false, true}) {
    std::vector<T> sum(kColumns, 100);
    SumRows<T, O>(kRows, kColumns, matrix.data(), {.data = sum.data(), .add = add});
    for (int64_t column = 0; column < kColumns; ++column) {
      T expected = add ? 100 : 0;
      for (int64_t row = 0; row < kRows; ++row)
        expected += static_cast<T>((row * kColumns + column) % 11 - 5);
      EXPECT_EQ(sum[column], expected) << column << (add ? " added" : "");
    }
  }
}

TEST(RowsTest, SumsTheRowsOfEachColumn) {
  CheckSumOfRows<float, float>();
  CheckSumOfRows<float, BFloat16>();
  CheckSumOfRows<double, double>();
}

TEST(RowsTest, AddsInPlace) {
  std::vector<float> sum = {1, 2, 3};
  Add<float>(sum, std::vector<float>{10, 20, 30}, sum);
  EXPECT_EQ(sum, (std::vector<float>{11, 22, 33}));
}

}  // namespace
}  // namespace evenkeel
