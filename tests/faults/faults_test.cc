// A fixed set of injected faults, all of which must end as they should; and that one which does not
// would be seen.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/faults/run_scenario.h"
#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/faults/verdict.h"
#include "evenkeel/tests/rank_report.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

// As many are every fault over every backend that has it, in full twice; over one backend of
// processes alone, once.
constexpr int kScenarios = 60, kShards = 4;
// Number of scenarios at a time: their ranks mostly wait for a silence or a deadline.
constexpr int kJobs = 4;
constexpr int kScenariosOverOne = 28;
constexpr int kSeed = 1;

class FaultsTest : public testing::TestWithParam<int> {};

TEST_P(FaultsTest, EndOnEveryRankWithTheGuiltyOneNamed) {
  ChildProcesses program;
  const bool is_in_full = TheTestBackend().is_in_full;
  const int scenarios = is_in_full ? kScenarios : kScenariosOverOne;
  std::vector<std::string> command = {"tests/faults",
                                      absl::StrCat("--seed=", kSeed),
                                      absl::StrCat("--scenarios=", scenarios),
                                      absl::StrCat("--shard=", GetParam()),
                                      absl::StrCat("--shards=", kShards),
                                      absl::StrCat("--jobs=", kJobs)};
  if (!is_in_full) command.push_back(absl::StrCat("--backend=", TheTestBackend().name));
  ASSERT_TRUE(program.Start(command, {}).ok());
  std::string said;
  EXPECT_TRUE(program.Listen(absl::Now() + absl::Minutes(12), [&](int, absl::string_view line) {
    absl::StrAppend(&said, line, "\n");
  }));
  EXPECT_THAT(said, HasSubstr(" scenarios: 0 failed"));
  if (is_in_full) {
    EXPECT_THAT(said, HasSubstr(absl::StrCat(kScenarios / kShards, " scenarios")));
  }
}

INSTANTIATE_TEST_SUITE_P(, FaultsTest, testing::Range(0, kShards));

TEST(ScenarioTest, AFewHaveEveryFaultOverProcessesAndThreads) {
  std::set<std::pair<Fault, bool>> seen;
  for (int index = 0; index < kScenariosOverOne; ++index) {
    const Scenario scenario = MakeScenario(kSeed, index);
    seen.insert({scenario.fault, scenario.as_processes});
  }
  for (Fault fault : kAllFaults) {
    EXPECT_THAT(seen, Contains(std::pair(fault, true))) << Name(fault);
    if (fault < Fault::kStoreReset) {
      EXPECT_THAT(seen, Contains(std::pair(fault, false))) << Name(fault);
    }
  }
}

TEST(ScenarioTest, IsTheSameForTheSameNumberAndCanHappen) {
  for (int index = 0; index < 2000; ++index) {
    const Scenario scenario = MakeScenario(5, index);
    SCOPED_TRACE(Describe(scenario));
    EXPECT_EQ(Describe(scenario), Describe(MakeScenario(5, index)));
    ASSERT_LT(scenario.victim, scenario.world_size());
    EXPECT_LE(scenario.step, scenario.inputs[scenario.victim]);
    EXPECT_EQ(scenario.step == scenario.inputs[scenario.victim],
              scenario.point == StepPoint::kLoopEnd);
    if (scenario.disagrees()) {
      EXPECT_LT(scenario.step, *std::min_element(scenario.inputs.begin(), scenario.inputs.end()));
    }
    if (scenario.cuts()) {
      EXPECT_TRUE(scenario.as_processes);
    }
  }
}

// The judge's verdict on outcomes that are wrong.
class VerdictTest : public testing::Test {
 protected:
  static Scenario Draw(Fault fault, JoinForm join = JoinForm::kNone) {
    return {.fault = fault,
            .as_processes = true,
            .join = join,
            .inputs = {4, 4, 4},
            .victim = 1,
            .step = 2};
  }

  // As it should be.
  static Outcome Good(const Scenario& scenario) {
    const std::vector<ToyState> alone = TrainToyAlone(GroupSteps(scenario.batches()));
    Outcome outcome;
    for (int rank = 0; rank < scenario.world_size(); ++rank) {
      RankReport report{
          .rank = rank, .diverged = rank == scenario.victim ? 1000000000 : 0, .ended = 1200000000};
      if (scenario.must_succeed()) {
        report.result = {.steps = 4, .last = alone[4], .ended = alone.back()};
      } else {
        report.result = {.status = absl::UnavailableError(
                             "rank 1 is at #2 barrier, ranks 0,2 are at #2 all_reduce: "
                             "record 4711 is broken"),
                         .steps = 2,
                         .last = alone[2]};
      }
      if (rank == scenario.victim && scenario.fault == Fault::kKilled) report.ended = 0;
      outcome.reports.push_back(report);
    }
    if (scenario.fault == Fault::kSlow) outcome.complaints = "rank 0 waits for rank 1";
    return outcome;
  }
};

TEST_F(VerdictTest, FindsNothingWhereAllIsWell) {
  for (Fault fault : kAllFaults) {
    SCOPED_TRACE(std::string(Name(fault)));
    const Scenario scenario = Draw(fault);
    EXPECT_THAT(Judge(scenario, Good(scenario)).complaints, IsEmpty());
  }
  const Scenario uneven = Draw(Fault::kSkipsStep, JoinForm::kEven);
  EXPECT_TRUE(uneven.must_succeed());
  EXPECT_THAT(Judge(uneven, Good(uneven)).complaints, IsEmpty());
}

TEST_F(VerdictTest, FindsWhoHangs) {
  const Scenario scenario = Draw(Fault::kKilled);
  Outcome outcome = Good(scenario);
  outcome.reports[2].ended = 0;
  EXPECT_TRUE(Judge(scenario, outcome).hangs);
  outcome = Good(scenario);
  outcome.is_over = false;
  EXPECT_TRUE(Judge(scenario, outcome).hangs);
}

TEST_F(VerdictTest, FindsWrongNumbersAlsoBeforeAnError) {
  const Scenario killed = Draw(Fault::kKilled), slow = Draw(Fault::kSlow);
  Outcome outcome = Good(killed);
  outcome.reports[0].result.last.weights[0] += 0.01f;
  EXPECT_TRUE(Judge(killed, outcome).is_wrong);
  outcome = Good(killed);
  outcome.reports[0].has_wrong_data = true;
  EXPECT_TRUE(Judge(killed, outcome).is_wrong);
  outcome = Good(slow);
  outcome.reports[2].result.ended.weights[0] += 0.01f;
  EXPECT_TRUE(Judge(slow, outcome).is_wrong);
  outcome = Good(slow);
  outcome.reports[2].result.ended.momentum[0] += 1e-6f;  // Close, but not what rank 0 has.
  EXPECT_TRUE(Judge(slow, outcome).is_wrong);
}

TEST_F(VerdictTest, FindsMessagesThatDoNotNameTheGuilty) {
  for (const auto& [fault, message] : std::vector<std::pair<Fault, std::string>>{
           {Fault::kKilled, "rank 0 waited 2s"},
           {Fault::kOtherSize, "rank 1 waited 2s"},  // One side of two.
           {Fault::kError, "rank 1 failed"}}) {
    const Scenario scenario = Draw(fault);
    Outcome outcome = Good(scenario);
    outcome.reports[0].result.status = absl::UnavailableError(message);
    EXPECT_TRUE(Judge(scenario, outcome).is_unnamed) << message;
  }
}

TEST_F(VerdictTest, FindsThatNobodyWasWarnedOfASlowRank) {
  const Scenario scenario = Draw(Fault::kSlow);
  Outcome outcome = Good(scenario);
  outcome.complaints.clear();
  EXPECT_TRUE(Judge(scenario, outcome).is_unnamed);
}

TEST_F(VerdictTest, FindsCrashes) {
  const Scenario scenario = Draw(Fault::kKilled);
  Outcome outcome = Good(scenario);
  outcome.crash = "process 2 ended with code 139";
  EXPECT_TRUE(Judge(scenario, outcome).is_other);
}

TEST_F(VerdictTest, FindsFalseEndsAndLateOnes) {
  Scenario scenario = Draw(Fault::kKilled);
  Outcome outcome = Good(scenario);
  outcome.reports[2].result.status = absl::OkStatus();
  EXPECT_TRUE(Judge(scenario, outcome).is_other);
  outcome = Good(scenario);
  outcome.reports[2].ended += 5000000000;
  EXPECT_TRUE(Judge(scenario, outcome).is_other);
  scenario = Draw(Fault::kSlow);
  outcome = Good(scenario);
  outcome.reports[2].result.status = absl::UnavailableError("rank 1 is silent");
  EXPECT_TRUE(Judge(scenario, outcome).is_other);
}

}  // namespace
}  // namespace evenkeel
