#include "evenkeel/comm/arith/finite.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace evenkeel::internal {
namespace {

template <typename T>
void ExpectFindsWith(InstructionSet set, DType dtype, T good, const std::vector<T>& bad) {
  for (const int64_t count : {0, 1, 255, 256, 257, 1000}) {
    std::vector<T> data(count, good);
    EXPECT_EQ(FirstNonfiniteWith(set, TensorView(data.data(), count, dtype)), -1);
    for (int64_t at = 0; at < count; at += 85) {
      for (const T value : bad) {
        data[at] = value;
        data.back() = value;
        EXPECT_EQ(FirstNonfiniteWith(set, TensorView(data.data(), count, dtype)), at) << count;
      }
      data[at] = data.back() = good;
    }
  }
}

template <typename T>
void ExpectFinds(DType dtype, T good, const std::vector<T>& bad) {
  for (const InstructionSet set : SupportedInstructionSets())
    ExpectFindsWith(set, dtype, good, bad);
}

TEST(FiniteTest, FindsTheFirst) {
  using F = std::numeric_limits<float>;
  using D = std::numeric_limits<double>;
  ExpectFinds<float>(DType::kFloat32, F::max(), {F::infinity(), -F::infinity(), F::quiet_NaN()});
  ExpectFinds<double>(DType::kFloat64, D::lowest(),
                      {D::infinity(), -D::infinity(), -D::quiet_NaN()});
  ExpectFinds<uint16_t>(DType::kFloat16, 0x7bff, {0x7c00, 0xfc00, 0x7e01});
  ExpectFinds<uint16_t>(DType::kBFloat16, 0xff7f, {0x7f80, 0xff80, 0x7fc1});
}

TEST(FiniteTest, IntegersAreFinite) {
  std::vector<int32_t> data(300, 0x7f80'0000);
  EXPECT_EQ(FirstNonfinite(TensorView(data.data(), 300, DType::kInt32)), -1);
}

}  // namespace
}  // namespace evenkeel::internal
