#include "evenkeel/comm/base/parties.h"

#include <vector>

#include "absl/status/status.h"
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
