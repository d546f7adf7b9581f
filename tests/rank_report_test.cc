#include "evenkeel/tests/rank_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(RankReportTest, ComesBackFromItsLineBitForBit) {
  RankReport report{.rank = 3, .diverged = 12, .ended = 345678901234567, .has_wrong_data = true};
  report.result.status = absl::UnavailableError("rank 1:\tit is \"gone\"\nfor ever");
  report.result.steps = 7;
  report.result.last.weights = {0.1f, -2.5e-30f};
  report.result.ended = {{1.0f / 3}, {-0.0f, 1e30f}};
  const std::string line = ToLine(report);
  EXPECT_EQ(line.find('\n'), line.size() - 1);

  const absl::StatusOr<RankReport> back = ReportFromLine(line);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rank, 3);
  EXPECT_EQ(back->diverged, 12);
  EXPECT_EQ(back->ended, 345678901234567);
  EXPECT_TRUE(back->has_wrong_data);
  EXPECT_EQ(back->result.status, report.result.status);
  EXPECT_EQ(back->result.steps, 7);
  EXPECT_EQ(back->result.last.weights, report.result.last.weights);
  EXPECT_EQ(ToLine(*back), line);
}

TEST(RankReportTest, RefusesOtherLines) {
  EXPECT_FALSE(ReportFromLine("").ok());
  EXPECT_FALSE(ReportFromLine("Segmentation fault").ok());
}

TEST(NamedRanksTest, FindsRanksInSentences) {
  EXPECT_THAT(
      NamedRanks("rank 1 is at #412 barrier (user); ranks 0,2,13 are at #412: the ranks disagree"),
      ElementsAre(0, 1, 2, 13));
  EXPECT_THAT(NamedRanks("ranks 4, 5 and 6, rank 7's process"), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(NamedRanks("a group of 5 ranks, rank unknown, world size 3, ranking 9"), IsEmpty());
  EXPECT_THAT(NamedRanks("rank"), IsEmpty());
}

}  // namespace
}  // namespace evenkeel
