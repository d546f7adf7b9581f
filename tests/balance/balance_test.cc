// Shares by measured speed, with ranks whose computing is slept: the short form of the program.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/balance/slept_cost.h"
#include "evenkeel/tests/balance/slept_training.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Returns what rank 0 finds; shares are equal on all ranks, or a step fails.
Outcome OutcomeOf(int world_size, const Workload& workload, double seconds) {
  Outcome result;
  const absl::Status status = RunTestRanks(world_size, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto training, SleptTraining::Create(&comm));
    EK_ASSIGN_OR_RETURN(const double rest_ms, training->MeasureRest());
    EK_ASSIGN_OR_RETURN(
        const Outcome outcome,
        training->Try(workload, {.rest_ms = rest_ms, .even_s = 0, .balanced_s = seconds}));
    if (comm.rank() == 0) result = outcome;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

class BalanceTest : public testing::TestWithParam<int> {};  // The number of ranks.

// Beside other tests ranks oversleep, so that other shares are the best ones: they have several
// attempts, and the times of steps are not compared.
TEST_P(BalanceTest, ARankAtHalfSpeedCostsLittleMoreThanItMust) {
  constexpr int kAttempts = 4;
  std::string seen;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const Outcome outcome = OutcomeOf(GetParam(), {.sample_ms = 0.6, .last_speed = 0.5}, 3.5);
    ASSERT_LE(outcome.part_by_costs, 1 + 1e-9);  // Else the best division is not the best.
    if (outcome.part_by_costs >= 0.95 && outcome.settled_step >= 0) return;
    absl::StrAppend(&seen, outcome.part_by_costs, " with ", absl::StrJoin(outcome.last_shares, ","),
                    "; ");
  }
  FAIL() << seen;
}

TEST_P(BalanceTest, EqualSpeedsStayWithinAQuantumOfEven) {
  const Outcome outcome = OutcomeOf(GetParam(), {.sample_ms = 0.5}, 2.5);
  EXPECT_LT(outcome.uneven_steps, 0.2) << absl::StrJoin(outcome.last_shares, ",");
  EXPECT_EQ(outcome.settled_step, 0);
}

INSTANTIATE_TEST_SUITE_P(All, BalanceTest, testing::Values(2, 4),
                         testing::PrintToStringParamName());

TEST(SleptCostTest, TheBestDivisionIsKnown) {
  const std::vector<int64_t> sizes = {4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64};
  const Workload half = {.last_speed = 0.5};
  EXPECT_EQ(BestShares(half, sizes, 2, 0), (std::vector<int64_t>{44, 20}));
  EXPECT_EQ(MeanStep(half, {44, 20}, 0), 44);
  EXPECT_EQ(MeanStep({.second_pass_ms = 20}, {36, 28}, 0), 56);
  for (const int world_size : {4, 8}) {  // By two methods.
    const std::vector<int64_t> best = BestShares(half, sizes, world_size, 0);
    EXPECT_EQ(MeanStep(half, best, 0), world_size == 4 ? 40 : 36) << absl::StrJoin(best, ",");
  }
  // A rank that computes for half of the time has half of the speed.
  EXPECT_NEAR(MeanStep({.last_quota = 0.5}, {32, 32}, 0), 64, 4);
  EXPECT_NEAR(MeanStep({.last_saving_ms = 120}, {32, 32}, 0), 38, 1e-9);
}

}  // namespace
}  // namespace evenkeel
