#include "evenkeel/comm/verify.h"

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(VerifyLevelTest, WordsAndLevelsAreOneToOne) {
  for (VerifyLevel level : {VerifyLevel::kOff, VerifyLevel::kPositions, VerifyLevel::kEvery}) {
    const absl::StatusOr<VerifyLevel> back = VerifyLevelFromString(ToString(level));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back, level);
  }
}

TEST(VerifyLevelTest, RefusesOtherWordsByName) {
  for (const char* word : {"", "Every", "all", "positions "}) {
    SCOPED_TRACE(word);
    const absl::Status status = VerifyLevelFromString(word).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(std::string("\"") + word + "\""));
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("off, positions, every"));
  }
}

}  // namespace
}  // namespace evenkeel
