#include "evenkeel/tests/stragglers/trial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace evenkeel {
namespace {

using testing::HasSubstr;

const Trial kLoaderOfRank3{.world_size = 4, .delay = Delay::kLoader, .rank = 3};

TEST(TrialTest, TheSlowRankAloneIsRight) {
  struct Case {
    Found found;
    bool is_rank, is_phase, is_false;
  };
  for (const Case& one : {
           Case{{{3}, StepPhase::kInput, {3}}, true, true, false},
           Case{{{3}, StepPhase::kForward, {3}}, true, false, false},
           Case{{{3}, StepPhase::kInput, {1, 3}}, true, true, true},
           Case{{{1}, StepPhase::kInput, {1}}, false, false, true},
           Case{{{1, 3}, StepPhase::kInput, {}}, false, false, true},
           Case{{{}, StepPhase::kInput, {}}, false, false, false},
       }) {
    SCOPED_TRACE(one.found.Text());
    const Verdict verdict = Judge(kLoaderOfRank3, one.found);
    EXPECT_EQ(verdict.is_rank, one.is_rank);
    EXPECT_EQ(verdict.is_phase, one.is_phase);
    EXPECT_EQ(verdict.is_false, one.is_false);
  }
}

TEST(TrialTest, WithoutADelayAnyAccusationIsFalse) {
  EXPECT_TRUE(Judge({.delay = Delay::kNone}, {.ever = {0}}).is_false);
  EXPECT_FALSE(Judge({.delay = Delay::kNone}, {}).is_false);
}

TEST(TrialTest, ThePhaseOfASlowCoreIsNotKnown) {
  const Verdict verdict = Judge({.delay = Delay::kThrottled, .rank = 1}, {.stragglers = {1}});
  EXPECT_TRUE(verdict.is_rank);
  EXPECT_EQ(verdict.is_phase, std::nullopt);
}

TEST(TrialTest, FindingsTravelAsText) {
  const absl::StatusOr<Found> found = Found::Parse("1,3|4|0,1,3");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->stragglers, (std::set<int>{1, 3}));
  EXPECT_EQ(found->phase, StepPhase::kOptimizer);
  EXPECT_EQ(found->Text(), "1,3|4|0,1,3");
  EXPECT_TRUE(Found::Parse(Found().Text()).ok());
  for (const char* text : {"", "1|2", "x|0|", "1|6|", "1|-1|", "1|0|y"})
    EXPECT_FALSE(Found::Parse(text).ok()) << text;
}

TEST(TrialTest, ATrialIsDrawnFromItsSeedAndIndex) {
  const TrialRange range{.delays = {Delay::kSaving, Delay::kThrottled}};
  std::set<std::string> descriptions;
  for (int index = 0; index < 200; ++index) {
    const Trial trial = DrawTrial(range, index);
    EXPECT_EQ(trial.Description(), DrawTrial(range, index).Description());
    EXPECT_LT(trial.rank, trial.world_size);
    EXPECT_GE(trial.fraction, 0.05);
    EXPECT_LE(trial.fraction, 0.5);
    if (trial.delay == Delay::kThrottled) {
      EXPECT_EQ(trial.world_size, 2);
    }
    descriptions.insert(trial.Description());
  }
  EXPECT_GT(descriptions.size(), 150u);
}

TEST(TrialTest, TheTableHasARowPerKindWorldAndBackend) {
  Scores scores;
  const Trial trial{.world_size = 4, .backend = "tcp", .delay = Delay::kLoader, .rank = 3};
  scores.Add(trial, Judge(trial, {{3}, StepPhase::kInput, {3}}));
  scores.Add(trial, Judge(trial, {{1}, StepPhase::kInput, {1}}));
  for (const char* name : {"slow loader, marked", "(4 ranks)", "(over tcp)", "all"}) {
    EXPECT_THAT(scores.Table(), HasSubstr(std::string("| ") + name + " | 2 | 1 | 1 of 2 | 1 |\n"));
  }
}

}  // namespace
}  // namespace evenkeel
