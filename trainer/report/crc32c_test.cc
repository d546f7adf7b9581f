#include "evenkeel/trainer/report/crc32c.h"

#include <gtest/gtest.h>

#include <string>

namespace evenkeel {
namespace {

// RFC 3720, appendix B.4.
TEST(Crc32cTest, HasTheValuesOfItsStandard) {
  std::string up(32, '\0'), down(32, '\0');
  for (int i = 0; i < 32; ++i) up[i] = static_cast<char>(i), down[i] = static_cast<char>(31 - i);
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(up), 0x46dd794eu);
  EXPECT_EQ(Crc32c(down), 0x113fdb5cu);
}

TEST(Crc32cTest, MasksByRotatingAndAdding) {
  EXPECT_EQ(MaskedCrc32c(""), 0xa282ead8u);
  // 0xe3069283 rotated right by 15 is 0x2507c60d.
  EXPECT_EQ(MaskedCrc32c("123456789"), 0x2507c60du + 0xa282ead8u);
}

}  // namespace
}  // namespace evenkeel
