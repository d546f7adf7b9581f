// A rank leaves in the middle of a step; the others recover and train on. Weights, buffers and
// optimizer state are then those of a run that did the finished steps with all ranks and the rest
// without that one, bit for bit: the local backend adds in rank order.

#include "evenkeel/join/recovery.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/recovery/replica.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;

struct Stop {
  int rank = -1;
  int step = -1;
  Point point = Point::kNowhere;
};

// A rank's final state.
struct Outcome {
  std::vector<std::vector<float>> values;
  std::vector<float> buffer;
  OptimizerState state;
};

Outcome OutcomeOf(Replica<>& replica) {
  return {replica.model.values(), replica.model.buffer(), replica.optimizer->state()};
}

void ExpectEqual(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.values, b.values);
  EXPECT_EQ(a.buffer, b.buffer);
  EXPECT_EQ(a.state, b.state);
}

void ExpectTraining(const Outcome& a, const Outcome& expected) {
  EXPECT_THAT(a.values, SameValues(expected.values));
  EXPECT_EQ(a.buffer, expected.buffer);
  EXPECT_TRUE(internal::IsSame(a.state, expected.state));
}

// `before` steps with `world` ranks, then those to `end` without rank `lost`, with a fresh group
// and fresh objects.
std::vector<Outcome> Reference(int world, int lost, int before, int end, const UpdateRule& rule) {
  std::vector<Replica<>> replicas(world);
  std::vector<OptimizerState> states(world);
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica<>& mine = replicas[comm.rank()];
    EK_RETURN_IF_ERROR(mine.Create(comm, rule));
    EK_RETURN_IF_ERROR(mine.Steps(0, before));
    states[comm.rank()] = mine.optimizer->state();
    mine.Destroy();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  std::vector<Outcome> outcomes(world - 1);
  status = RunTestRanks(world - 1, [&](Communicator& comm) -> absl::Status {
    const int old_rank = comm.rank() + (comm.rank() >= lost);
    Replica<>& mine = replicas[old_rank];
    EK_RETURN_IF_ERROR(mine.Create(comm, rule));
    EK_RETURN_IF_ERROR(mine.optimizer->LoadState(states[old_rank]));
    EK_RETURN_IF_ERROR(mine.Steps(before, end));
    outcomes[comm.rank()] = OutcomeOf(mine);
    mine.Destroy();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return outcomes;
}

struct Case {
  int world = 4;
  Stop lost;
  Stop late;  // Another rank, which stops there until it hears of it: so the survivors are at
              // different steps.
  UpdateRule rule = Sgd{.learning_rate = 0.1, .momentum = 0.9};
  int steps_then = -1;  // The step from which the survivors continue; -1: it depends on timing.
};

constexpr int kSteps = 7;

void RunCase(const Case& test) {
  Group group = *CreateTestGroup(test.world);
  const int survivors = test.world - 1;
  std::vector<Outcome> outcomes(survivors), taken_over(survivors);
  std::vector<int64_t> steps(survivors);
  OnEach(test.world, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], test.rule));
    absl::Status failed;
    for (int step = 0; step < kSteps && failed.ok(); ++step) {
      failed = mine.Step(step, [&](Point point) -> absl::Status {
        if (step == test.lost.step && point == test.lost.point && rank == test.lost.rank) {
          return test.steps_then == step ? LostWithinTheStep(*group[rank]) : Lost();
        }
        if (step != test.late.step || point != test.late.point || rank != test.late.rank)
          return absl::OkStatus();
        while (group[rank]->status().ok()) std::this_thread::yield();
        return absl::UnavailableError("this rank was late");
      });
    }
    EXPECT_FALSE(failed.ok());
    if (rank == test.lost.rank) {
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover(mine.joinables(), *group[rank], {.timeout = absl::Seconds(60)}));
    group[rank].reset();
    EXPECT_THAT(recovered.lost, ElementsAre(test.lost.rank));
    EXPECT_EQ(mine.optimizer->steps_finished(), recovered.steps);
    const int now = recovered.comm->rank();
    taken_over[now] = OutcomeOf(mine);
    EK_RETURN_IF_ERROR(mine.Steps(static_cast<int>(recovered.steps), kSteps));
    outcomes[now] = OutcomeOf(mine);
    steps[now] = recovered.steps;
    mine.Destroy();
    return recovered.comm->Finalize();
  });
  for (int rank = 1; rank < survivors; ++rank) {
    EXPECT_EQ(steps[rank], steps[0]);
    ExpectEqual(taken_over[rank], taken_over[0]);
  }
  EXPECT_TRUE(test.steps_then < 0 || steps[0] == test.steps_then) << steps[0];
  const std::vector<Outcome> expected =
      Reference(test.world, test.lost.rank, static_cast<int>(steps[0]), kSteps, test.rule);
  for (int rank = 0; rank < survivors; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    ExpectTraining(outcomes[rank], expected[rank]);
  }
}

class RecoveryTest : public testing::TestWithParam<int> {};  // Which rank is lost.

TEST_P(RecoveryTest, ARankIsLostInForward) {
  for (int step : {0, 3})
    RunCase({.lost = {GetParam(), step, Point::kForward}, .steps_then = step});
}

TEST_P(RecoveryTest, ARankIsLostInTheMiddleOfBackward) {
  for (int step : {0, 1, 4})
    RunCase({.lost = {GetParam(), step, Point::kBackward}, .steps_then = step});
  RunCase({.lost = {GetParam(), 3, Point::kBackward},
           .rule = Adam{.learning_rate = 0.01},
           .steps_then = 3});
}

TEST_P(RecoveryTest, ARankIsLostBetweenTheReductionAndTheOptimizer) {
  RunCase({.lost = {GetParam(), 2, Point::kReduced}});
  RunCase({.lost = {GetParam(), 2, Point::kReduced}, .rule = Adam{.learning_rate = 0.01}});
}

TEST_P(RecoveryTest, ARankIsLostRightAfterTheOptimizer) {
  RunCase({.lost = {GetParam(), 2, Point::kStepped}});
  RunCase({.lost = {GetParam(), 0, Point::kStepped}});
}

// One has reduced and not stepped; the others are in the forward of the next step when they learn
// of the loss.
TEST_P(RecoveryTest, SurvivorsAtDifferentStepsGoBackToTheEarlier) {
  for (int late : {0, 1, 3}) {
    if (late == GetParam()) continue;
    SCOPED_TRACE(late);
    RunCase({.lost = {GetParam(), 2, Point::kStepped},
             .late = {late, 2, Point::kReduced},
             .steps_then = 2});
  }
}

TEST_P(RecoveryTest, ARankIsLostOutOfTwo) {
  if (GetParam() < 2)
    RunCase({.world = 2, .lost = {GetParam(), 3, Point::kBackward}, .steps_then = 3});
}

INSTANTIATE_TEST_SUITE_P(LostRanks, RecoveryTest, testing::Values(0, 1, 3));

}  // namespace
}  // namespace evenkeel
