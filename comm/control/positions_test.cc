#include "evenkeel/comm/control/positions.h"

#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(PositionsTest, ComeBackAsTheyWere) {
  const Positions mine{{"user", {413, 18446744073709551615u, "barrier (user)"}},
                       {"data_parallel#0", {0, 0, ""}}};
  const Positions back = ParsePositions(Serialize(mine));
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back.at("user").position, 413);
  EXPECT_EQ(back.at("user").hash, 18446744073709551615u);
  EXPECT_EQ(back.at("user").last, "barrier (user)");
  EXPECT_EQ(back.at("data_parallel#0").position, 0);
}

TEST(PositionsTest, WhatIsNotUnderstoodIsLeftOut) {
  EXPECT_TRUE(ParsePositions("").empty());
  EXPECT_EQ(ParsePositions("x\ny\t1\nz\tone\t2\tw\nuser\t1\t2\tw\n").size(), 1u);
}

TEST(ComparePositionsTest, NamesAllRanksSmallestPartyFirst) {
  const std::string ahead = Serialize({{"user", {5, 7, "barrier (user)"}}});
  const std::string behind = Serialize({{"user", {4, 6, "all_reduce (user) float32[2] sum"}}});
  EXPECT_TRUE(ComparePositions("Finalize", {ahead, ahead, ahead}).ok());
  const absl::Status status = ComparePositions("Finalize", {behind, ahead, behind});
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(status.message(),
            "Finalize: channel \"user\": rank 1 ended after 5 (barrier (user)); ranks 0,2 ended "
            "after 4 (all_reduce "
            "(user) float32[2] sum): the ranks disagree");
}

TEST(ComparePositionsTest, AChannelThatOneRankDoesNotHaveIsAtItsBeginning) {
  const std::string with = Serialize({{"user", {1, 7, "barrier (user)"}}});
  EXPECT_EQ(ComparePositions("Finalize", {with, ""}).message(),
            "Finalize: channel \"user\": rank 0 ended after 1 (barrier (user)); rank 1 ended after "
            "0: the ranks disagree");
  EXPECT_TRUE(ComparePositions("Finalize", {Serialize({{"user", {0, 0, ""}}}), ""}).ok());
}

TEST(ComparePositionsTest, AsManyCollectivesNeedNotBeTheSame) {
  const std::string a = Serialize({{"user", {2, 7, "barrier (user)"}}});
  const std::string b = Serialize({{"user", {2, 9, "barrier (user)"}}});
  EXPECT_EQ(
      ComparePositions("SetVerifyLevel", {a, b}).message(),
      "SetVerifyLevel: channel \"user\": rank 0 ended after 2 (barrier (user)), which are not the "
      "same (hash 7); "
      "rank 1 ended after 2 (barrier (user)), which are not the same (hash 9): the ranks disagree");
}

}  // namespace
}  // namespace evenkeel::internal
