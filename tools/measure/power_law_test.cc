#include "evenkeel/tools/measure/power_law.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(PowerLawTest, FindsTheExponent) {
  for (const double exponent : {0.0, 0.5, 1.0, 2.0}) {
    SCOPED_TRACE(exponent);
    std::vector<double> sizes, seconds;
    for (double size = 100; size <= 1e6; size *= 10) {
      sizes.push_back(size);
      seconds.push_back(3e-9 * std::pow(size, exponent));
    }
    EXPECT_NEAR(ExponentOf(sizes, seconds), exponent, 1e-9);
  }
}

TEST(PowerLawTest, AConstantCostMakesTheExponentSmaller) {
  std::vector<double> sizes, seconds;
  for (double size = 100; size <= 1e6; size *= 10) {
    sizes.push_back(size);
    seconds.push_back(1e-3 + 1e-8 * size);
  }
  EXPECT_LT(ExponentOf(sizes, seconds), 0.9);
  EXPECT_GT(ExponentOf(sizes, seconds), 0.1);
}

}  // namespace
}  // namespace evenkeel
