#include "evenkeel/join/internal/recovery_plan.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/join/held_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

RecoveryFacts At(std::vector<int64_t> counts) {
  return {.names = "ddp#0, optimizer#0", .steps = counts[0], .counts = std::move(counts)};
}

RecoveryPlan Plan(const std::vector<RecoveryFacts>& by_rank) {
  absl::StatusOr<RecoveryPlan> plan = PlanRecovery(by_rank);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : RecoveryPlan();
}

TEST(PlanRecoveryTest, TakesTheLowestRankOfThoseAtTheEarliestStep) {
  const RecoveryPlan plan = Plan({At({8}), At({7}), At({8}), At({7})});
  EXPECT_EQ(plan.source, 1);
  EXPECT_EQ(plan.steps, 7);
  EXPECT_THAT(plan.ahead, ElementsAre(1, 0, 1, 0));
}

TEST(PlanRecoveryTest, ANewcomerIsComparedWithARankThatHasBeenThere) {
  RecoveryFacts newcomer{.is_newcomer = true, .names = "ddp#0"};
  EXPECT_THAT(std::string(PlanRecovery({newcomer, At({8})}).status().message()),
              HasSubstr("rank 1 passes ddp#0, optimizer#0, rank 0 ddp#0"));
}

TEST(PlanRecoveryTest, NewcomersHaveNoState) {
  RecoveryFacts newcomer = At({0});
  newcomer.is_newcomer = true;
  const RecoveryPlan plan = Plan({newcomer, At({8}), newcomer, At({7})});
  EXPECT_EQ(plan.source, 3);
  EXPECT_EQ(plan.steps, 7);
  EXPECT_THAT(plan.ahead, ElementsAre(-1, 1, -1, 0));
  EXPECT_THAT(plan.newcomers, ElementsAre(0, 2));
  EXPECT_THAT(Plan({newcomer, At({0})}).ahead, ElementsAre(-1, 0)) << "before the first step";
  EXPECT_THAT(std::string(PlanRecovery({newcomer, newcomer}).status().message()),
              HasSubstr("no rank has a complete state"));
}

TEST(PlanRecoveryTest, PassesOverRanksThatAreInTheMiddleOfSomething) {
  RecoveryFacts torn = At({7});
  torn.state = {StateKind::kTorn, "optimizer#0 was in the middle of an update"};
  const RecoveryPlan plan = Plan({torn, At({8}), At({8})});
  EXPECT_EQ(plan.source, 1);
  EXPECT_EQ(plan.steps, 8);
  EXPECT_THAT(plan.ahead, ElementsAre(-1, 0, 0));
  // A patched state is better, too.
  RecoveryFacts patched = At({8});
  patched.state = {StateKind::kPatched, "in the middle of an update, and does not mind"};
  EXPECT_EQ(Plan({torn, patched}).source, 1);
}

TEST(PlanRecoveryTest, TakesAPatchedStateOnlyWhereNobodyHasAWholeOne) {
  RecoveryFacts patched = At({7});
  patched.state = {StateKind::kPatched, "in the middle of an update, and does not mind"};
  EXPECT_EQ(Plan({patched, At({8})}).source, 1);
  EXPECT_EQ(Plan({patched, patched}).source, 0);
}

// Only one of two optimizers had stepped on rank 0; the caller's own count of steps does not show
// it.
TEST(PlanRecoveryTest, OfEqualStepsTheOneWithFewerUpdatesCounts) {
  RecoveryFacts between = At({7, 36});
  between.steps = 7;
  const RecoveryPlan plan = Plan({between, At({7, 35})});
  EXPECT_EQ(plan.source, 1);
  EXPECT_THAT(plan.ahead, ElementsAre(-1, 0));
}

TEST(PlanRecoveryTest, SaysWhyThereIsNothingToGoOnFrom) {
  RecoveryFacts first = At({7}), second = At({8}), third = At({7});
  first.state = {StateKind::kTorn, "one of two"};
  second.state = {StateKind::kTorn, "two of three"};
  const std::string text(PlanRecovery({first, second}).status().message());
  EXPECT_THAT(text,
              HasSubstr("no rank has a complete state to continue from: rank 0 has finished 7 "
                        "steps, one of two; rank 1 "
                        "has finished 8 steps, two of three"));
  third.error = absl::InvalidArgumentError("no list");
  EXPECT_EQ(PlanRecovery({At({7}), third}).status(), absl::InvalidArgumentError("rank 1: no list"));
  third.error = absl::OkStatus();
  third.names = "optimizer#0";
  EXPECT_THAT(std::string(PlanRecovery({At({7}), third}).status().message()),
              HasSubstr("rank 0 passes ddp#0, optimizer#0, rank 1 optimizer#0"));
}

TEST(HeldStateTest, TheWorstRemainsAndOfTwoEqualsTheLater) {
  HeldState state;
  state.Worsen({StateKind::kPatched, "the first"});
  state.Worsen({StateKind::kPatched, "the second"});
  state.Worsen({});
  EXPECT_EQ(state.kind, StateKind::kPatched);
  EXPECT_EQ(state.why, "the second");
  state.Worsen({StateKind::kTorn, "the third"});
  state.Worsen({StateKind::kPatched, "the fourth"});
  EXPECT_EQ(state.kind, StateKind::kTorn);
  EXPECT_EQ(state.why, "the third");
}

TEST(RecoveryFactsTest, SurvivesTheWireAndRefusesEverythingElse) {
  RecoveryFacts facts = At({7, 8, 9});
  facts.error = absl::InvalidArgumentError("a text,\nof two lines");
  facts.state = {StateKind::kTorn, "torn"};
  const std::string bytes = ToBytes(facts);
  absl::StatusOr<RecoveryFacts> parsed = FromBytes<RecoveryFacts>(bytes, "facts");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(ToBytes(*parsed), bytes);
  EXPECT_EQ(parsed->error, facts.error);
  EXPECT_EQ(parsed->counts, facts.counts);
  EXPECT_EQ(parsed->state.kind, StateKind::kTorn);
  for (const std::string& other : {std::string(), std::string("0"), "x" + bytes})
    EXPECT_FALSE(FromBytes<RecoveryFacts>(other, "facts").ok()) << other;
}

}  // namespace
}  // namespace evenkeel::internal
