#include "evenkeel/comm/ranks/rank_names.h"

#include "absl/status/status.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/failure_info.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

constexpr Collective kBarrier{.kind = CollectiveKind::kBarrier};

TEST(RankNamesTest, AnErrorNamesTheRankAndTheOperation) {
  const RankNames names({0, 2});
  const absl::Status status =
      names.AtOperation(absl::InternalError("broken"), /*rank=*/1, /*position=*/412, kBarrier);
  EXPECT_EQ(status.message(), "rank 2 at #412 barrier (user): broken");
  EXPECT_EQ(FailureInfoOf(status), (FailureInfo{.kind = FailureKind::kRankFailed,
                                                .ranks = {2},
                                                .operation = "barrier (user)",
                                                .position = 412}));
  EXPECT_TRUE(names.AtOperation(absl::OkStatus(), 1, 412, kBarrier).ok());
}

TEST(RankNamesTest, ADisagreementStaysAsItIs) {
  const absl::Status all = WithFailureInfo(absl::FailedPreconditionError("the ranks disagree"),
                                           {.kind = FailureKind::kDisagreement});
  EXPECT_EQ(RankNames().AtOperation(all, 1, 412, kBarrier), all);
}

}  // namespace
}  // namespace evenkeel::internal
