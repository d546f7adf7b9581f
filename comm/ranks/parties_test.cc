#include "evenkeel/comm/ranks/parties.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(RenumberTest, CausesGetTheirNumbersInTheOtherGroup) {
  const std::vector<int> part = {6, 3, 5}, whole = {2, 3, 4, 5, 6};
  const FailureInfo in_part{.kind = FailureKind::kRankLost, .ranks = {0, 1}, .step = 7};
  const absl::Status lost =
      Renumber(WithFailureInfo(absl::UnavailableError("lost"), in_part), part, whole);
  EXPECT_EQ(lost.message(), "lost");
  EXPECT_EQ(FailureInfoOf(lost),
            (FailureInfo{.kind = FailureKind::kRankLost, .ranks = {1, 4}, .step = 7}));
  const FailureInfo in_whole{.ranks = {0, 1, 9}};
  EXPECT_EQ(
      FailureInfoOf(Renumber(WithFailureInfo(absl::UnavailableError("x"), in_whole), whole, part)),
      FailureInfo{.ranks = {1}})
      << "job rank 2 is not in the part, and there is no rank 9";
}

TEST(RenumberTest, AnErrorWithoutInfoStaysAsItIs) {
  const absl::Status wrong = absl::InvalidArgumentError("rank 1 is wrong");
  EXPECT_EQ(Renumber(wrong, {0, 1}, {1, 0}), wrong);
  EXPECT_TRUE(Renumber(absl::OkStatus(), {0}, {0}).ok());
}

std::vector<int> Ranks(int begin, int end, int step = 1) {
  std::vector<int> ranks;
  for (int rank = begin; rank < end; rank += step) ranks.push_back(rank);
  return ranks;
}

TEST(RankListTest, StaysShort) {
  EXPECT_EQ(RankList({7}), "rank 7");
  EXPECT_EQ(RankList(Ranks(0, 16)), "ranks 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15");
  EXPECT_EQ(RankList(Ranks(0, 17)), "ranks 0-16");
  std::vector<int> most = Ranks(0, 1023);
  most.insert(most.end(), {1024, 4094, 4095});
  EXPECT_EQ(RankList(most), "ranks 0-1022,1024,4094-4095");
  EXPECT_EQ(RankList(Ranks(1, 4096, 2)),
            "ranks 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31 and 2032 more");
  std::vector<int> rows;
  for (int row = 0; row < 17; ++row) {
    rows.push_back(10 * row);
    rows.push_back(10 * row + 1);
  }
  EXPECT_EQ(RankList(rows),
            "ranks 0-1,10-11,20-21,30-31,40-41,50-51,60-61,70-71,80-81,90-91,100-101,110-111,"
            "120-121,130-131,140-141,150-151 and 2 more");
}

TEST(DescribeTest, CountsPartiesBeyondTheEighth) {
  Parties parties;
  for (int rank = 0; rank < 8; ++rank) parties[rank] = absl::StrCat("value ", rank / 2 * 2);
  EXPECT_EQ(
      Describe(parties, "has", "have"),
      "ranks 0,1 have value 0; ranks 2,3 have value 2; ranks 4,5 have value 4; ranks 6,7 have "
      "value 6");
  for (int rank = 0; rank < 4096; ++rank) parties[rank] = rank < 10 ? absl::StrCat(rank) : "most";
  EXPECT_EQ(Describe(parties, "has", "have"),
            "rank 0 has 0; rank 1 has 1; rank 2 has 2; rank 3 has 3; rank 4 has 4; rank 5 has 5; "
            "rank 6 has 6; ranks 10-4095 have most; 3 more ranks have 3 other values");
}

TEST(DisagreementTest, NamesTheSmallestParty) {
  const absl::Status status = Disagreement({{0, AtOperation{7, "barrier"}},
                                            {1, AtOperation{7, "reduce"}},
                                            {2, AtOperation{7, "barrier"}}});
  EXPECT_EQ(status.message(),
            "rank 1 is at #7 reduce; ranks 0,2 are at #7 barrier: the ranks disagree");
  EXPECT_EQ(
      FailureInfoOf(status),
      (FailureInfo{
          .kind = FailureKind::kDisagreement, .ranks = {1}, .operation = "reduce", .position = 7}));
}

TEST(DisagreementTest, NamesAllPartiesThatMayBeWrong) {
  const absl::Status status = Disagreement(Parties{{3, "a"}, {1, "b"}, {0, "c"}, {2, "c"}});
  EXPECT_EQ(FailureInfoOf(status),
            (FailureInfo{.kind = FailureKind::kDisagreement, .ranks = {1, 3}}));
}

}  // namespace
}  // namespace evenkeel::internal
