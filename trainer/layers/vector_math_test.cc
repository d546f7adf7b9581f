#include "evenkeel/trainer/layers/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vectorised.h"

namespace evenkeel {
namespace {

struct ExpLoop {
  EK_ALWAYS_INLINE static int64_t Run(int64_t n, const float* input, float* output) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) output[i] = Exp(input[i]);
    return n;
  }
};

// All that this processor can run.
std::vector<LoopCopy> Copies() {
  std::vector<LoopCopy> copies = {LoopCopy::kBaseline};
  if (BestLoopCopy() != LoopCopy::kBaseline) copies.push_back(LoopCopy::kAvx2);
  if (BestLoopCopy() == LoopCopy::kAvx512) copies.push_back(LoopCopy::kAvx512);
  return copies;
}

TEST(ExpTest, IsWithinTwoUnitsOfTheLastPlaceInEveryCopy) {
  std::vector<float> input;
  for (float x = -87; x <= 88; x += 0.0037f) input.push_back(x);
  for (LoopCopy copy : Copies()) {
    std::vector<float> output(input.size());
    ASSERT_EQ(
        RunCopy<ExpLoop>(copy, static_cast<int64_t>(input.size()), input.data(), output.data()),
        static_cast<int64_t>(input.size()));
    double worst = 0;
    for (size_t i = 0; i < input.size(); ++i) {
      const double exact = std::exp(static_cast<double>(input[i]));
      const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
      worst = std::max(worst, std::abs(output[i] - exact) / unit);
    }
    EXPECT_LT(worst, 2) << "copy " << static_cast<int>(copy);
  }
}

TEST(ExpTest, EndsOfTheRange) {
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-0.0f), 1.0f);
  EXPECT_EQ(Exp(-88.0f), 0.0f);
  EXPECT_EQ(Exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(Exp(1000.0f), Exp(88.0f));
  EXPECT_TRUE(std::isfinite(Exp(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(NarrowTest, RoundsAsBFloat16Does) {
  for (const float value :
       {0.0f, -0.0f, 1.0f, 1.00390625f, 1.01171875f, 1.0f / 3, -1e30f, 3.4e38f, 1e-40f, INFINITY}) {
    EXPECT_EQ(Narrow<BFloat16>(value).bits, BFloat16(value).bits) << value;
    EXPECT_EQ(Widen(BFloat16(value)), static_cast<float>(BFloat16(value)));
  }
  EXPECT_TRUE(std::isnan(Widen(Narrow<BFloat16>(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(Widen(Narrow<BFloat16>(std::bit_cast<float>(0x7F800001)))));
  EXPECT_EQ(Narrow<double>(1.5), 1.5);
}

}  // namespace
}  // namespace evenkeel
