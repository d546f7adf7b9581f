#include "evenkeel/trainer/layers/rows.h"

#include <gtest/gtest.h>

#include <vector>

namespace evenkeel {
namespace {

TEST(RowsTest, ReluGradientPassesWhereTheOutputIsPositive) {
  const std::vector<double> output = {0, 0.5, 3};
  std::vector<double> diff = {7, 8, 9};
  ReluBackward<double>(output, diff);
  EXPECT_EQ(diff, (std::vector<double>{0, 8, 9}));
}

TEST(RowsTest, AddsInPlace) {
  std::vector<float> sum = {1, 2, 3};
  Add<float>(sum, std::vector<float>{10, 20, 30}, sum);
  EXPECT_EQ(sum, (std::vector<float>{11, 22, 33}));
}

}  // namespace
}  // namespace evenkeel
