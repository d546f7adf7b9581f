#include "evenkeel/comm/net/hmac.h"

#include <string>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(HmacTest, GivesTheDigestsOfRfc4231) {
  EXPECT_EQ(absl::BytesToHexString(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(absl::BytesToHexString(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(HmacTest, TakesOnlyTheWholeDigest) {
  const std::string digest = HmacSha256("key", "data");
  std::string other = digest;
  other.back() ^= 1;
  EXPECT_TRUE(IsDigest(digest, digest));
  EXPECT_FALSE(IsDigest(other, digest));
  EXPECT_FALSE(IsDigest(digest.substr(1), digest));
  EXPECT_FALSE(IsDigest("", ""));
}

TEST(HmacTest, RandomBytesDiffer) {
  const auto a = RandomBytes(32), b = RandomBytes(32);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->size(), 32u);
  EXPECT_NE(*a, *b);
}

}  // namespace
}  // namespace evenkeel::internal
