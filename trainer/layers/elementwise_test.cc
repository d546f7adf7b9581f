#include "evenkeel/trainer/layers/elementwise.h"

#include <gtest/gtest.h>

#include <vector>

namespace evenkeel {
namespace {

TEST(ElementwiseTest, ReluKeepsWhatIsPositive) {
  std::vector<float> values = {-2, -0.0f, 0, 0.5f, 3};
  ReluForward<float>(values, values);
  EXPECT_EQ(values, (std::vector<float>{0, 0, 0, 0.5f, 3}));
}

TEST(ElementwiseTest, ReluGradientPassesWhereTheOutputIsPositive) {
  const std::vector<double> output = {0, 0.5, 3};
  std::vector<double> diff = {7, 8, 9};
  ReluBackward<double>(output, diff);
  EXPECT_EQ(diff, (std::vector<double>{0, 8, 9}));
}

TEST(ElementwiseTest, AddsInPlace) {
  std::vector<float> sum = {1, 2, 3};
  Add<float>(sum, std::vector<float>{10, 20, 30}, sum);
  EXPECT_EQ(sum, (std::vector<float>{11, 22, 33}));
}

}  // namespace
}  // namespace evenkeel
