// Recovery with a sharded optimizer: what a lost rank owned is gone, what the others own is not.

#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/tests/recovery/replica.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::Eq;
using testing::HasSubstr;
using testing::IsEmpty;

const UpdateRule kRule = Sgd{.learning_rate = 0.1, .momentum = 0.9};
constexpr int kWorld = 4;
constexpr int kSteps = 6;

absl::Status StepUntil(Replica<WholeTensors>& mine, int rank, int stopping, int step, Point where) {
  for (int s = 0; s <= step; ++s) {
    EK_RETURN_IF_ERROR(mine.Step(s, [&](Point point) {
      return rank == stopping && s == step && point == where ? Lost() : absl::OkStatus();
    }));
  }
  return absl::InternalError("the step did not fail");
}

RecoveryOptions Patient(const absl::Status& why = absl::OkStatus()) {
  return {.timeout = absl::Seconds(60), .why = why};
}

// The same with the whole state on every rank: after `before` steps with all ranks, the state of
// the parameters in `forgotten` is forgotten, and rank `lost` too. States and values after `before`
// steps, and values at the end.
struct Unsharded {
  OptimizerState state;
  std::vector<std::vector<float>> values, last_values;
};

Unsharded TrainUnsharded(int lost, int before, const std::vector<int>& forgotten) {
  Unsharded result;
  std::vector<Replica<>> replicas(kWorld);
  absl::Status status = RunTestRanks(kWorld, [&](Communicator& comm) -> absl::Status {
    Replica<>& mine = replicas[comm.rank()];
    EK_RETURN_IF_ERROR(mine.Create(comm, kRule));
    EK_RETURN_IF_ERROR(mine.Steps(0, before));
    if (comm.rank() == 0) {
      result.state = mine.optimizer->state();
      result.values = mine.model.values();
    }
    mine.Destroy();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  OptimizerState kept = result.state;
  for (int param : forgotten) kept.params.erase(param);
  status = RunTestRanks(kWorld - (lost >= 0), [&](Communicator& comm) -> absl::Status {
    Replica<>& mine = replicas[comm.rank() + (lost >= 0 && comm.rank() >= lost)];
    EK_RETURN_IF_ERROR(mine.Create(comm, kRule));
    EK_RETURN_IF_ERROR(mine.optimizer->LoadState(kept));
    EK_RETURN_IF_ERROR(mine.Steps(before, kSteps));
    if (comm.rank() == 0) result.last_values = mine.model.values();
    mine.Destroy();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

TEST(ShardedRecoveryTest, ALostShardIsRefusedOnAllSurvivorsWithTheCheckpointToResumeFrom) {
  for (int lost : {0, 2}) {
    Group group = *CreateTestGroup(kWorld);
    std::vector<absl::Status> refused(kWorld);
    OnEach(kWorld, [&](int rank) -> absl::Status {
      Replica<WholeTensors> mine;
      EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
      mine.optimizer->SetCheckpointHint("runs/7/step_2.safetensors");
      EXPECT_FALSE(StepUntil(mine, rank, lost, 3, Point::kBackward).ok());
      if (rank != lost) refused[rank] = Recover(mine.joinables(), *group[rank], Patient()).status();
      mine.Destroy();  // Although the new group is gone.
      group[rank].reset();
      return absl::OkStatus();
    });
    for (int rank = 0; rank < kWorld; ++rank) {
      if (rank == lost) continue;
      EXPECT_EQ(refused[rank].code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(
          std::string(refused[rank].message()),
          AllOf(HasSubstr(absl::StrCat(
                    "rank ", lost, " is lost, and with it its part of the optimizer's state: ",
                    "resume from a checkpoint (runs/7/step_2.safetensors), or choose what "
                    "to do with a lost shard (lost_shard)")),
                Eq(std::string(refused[lost == 0 ? 1 : 0].message()))));
    }
  }
}

TEST(ShardedRecoveryTest, BeforeTheFirstStepNothingIsLost) {
  Group group = *CreateTestGroup(kWorld);
  OnEach(kWorld, [&](int rank) -> absl::Status {
    Replica<WholeTensors> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    EXPECT_FALSE(StepUntil(mine, rank, 3, 0, Point::kForward).ok());
    if (rank == 3) {
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(mine.joinables(), *group[rank], Patient()));
    EK_RETURN_IF_ERROR(mine.Steps(0, kSteps));
    EXPECT_THAT(mine.model.values(), SameValues(TrainUnsharded(3, 0, {}).last_values));
    mine.Destroy();
    return recovered.comm->Finalize();
  });
}

TEST(ShardedRecoveryTest, AFreshShardBeginsAnewAndTheRestIsKept) {
  for (int lost : {0, 1, 3}) {
    SCOPED_TRACE(lost);
    Group group = *CreateTestGroup(kWorld);
    std::vector<int> forgotten;
    std::vector<OptimizerState> states(kWorld);
    std::vector<std::vector<std::vector<float>>> values(kWorld), last_values(kWorld);
    OnEach(kWorld, [&](int rank) -> absl::Status {
      Replica<WholeTensors> mine;
      EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule, LostShard::kFresh));
      if (rank == lost) {
        for (int param = 0; param < mine.model.params().size(); ++param) {
          if (mine.optimizer->owner(param) == rank) forgotten.push_back(param);
        }
      }
      EXPECT_FALSE(StepUntil(mine, rank, lost, 3, Point::kBackward).ok());
      if (rank == lost) {
        mine.Destroy();
        group[rank].reset();
        return absl::OkStatus();
      }
      EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(mine.joinables(), *group[rank], Patient()));
      group[rank].reset();
      EXPECT_EQ(recovered.steps, 3);
      values[rank] = mine.model.values();
      EK_ASSIGN_OR_RETURN(states[rank], mine.optimizer->Consolidate());
      EK_RETURN_IF_ERROR(mine.Steps(3, kSteps));
      last_values[rank] = mine.model.values();
      mine.Destroy();
      return recovered.comm->Finalize();
    });
    ASSERT_FALSE(forgotten.empty());
    Unsharded expected = TrainUnsharded(lost, 3, forgotten);
    for (int param : forgotten) expected.state.params.erase(param);
    for (int rank = 0; rank < kWorld; ++rank) {
      if (rank == lost) continue;
      EXPECT_TRUE(internal::IsSame(states[rank], expected.state));
      EXPECT_THAT(values[rank], SameValues(expected.values));
      EXPECT_THAT(last_values[rank], SameValues(expected.last_values));
    }
  }
}

// An error of one rank's own, which is not lost: nothing is.
TEST(ShardedRecoveryTest, WhereNobodyIsLostNoStateIs) {
  Group group = *CreateTestGroup(kWorld);
  const std::vector<std::vector<float>> expected = TrainUnsharded(-1, 3, {}).last_values;
  OnEach(kWorld, [&](int rank) -> absl::Status {
    Replica<WholeTensors> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    const absl::Status failed = StepUntil(mine, rank, 1, 3, Point::kBackward);
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover(mine.joinables(), *group[rank], Patient(failed)));
    EXPECT_THAT(recovered.lost, IsEmpty());
    EXPECT_EQ(recovered.steps, 3);
    EK_RETURN_IF_ERROR(mine.Steps(3, kSteps));
    EXPECT_EQ(mine.model.values(), expected);
    mine.Destroy();
    return recovered.comm->Finalize();
  });
}

// The others have begun to update what they own, and can't go back.
TEST(ShardedRecoveryTest, AnUpdateThatWasBegunCannotBeTakenBack) {
  Group group = *CreateTestGroup(kWorld);
  std::atomic<int> reduced = 0;
  OnEach(kWorld, [&](int rank) -> absl::Status {
    Replica<WholeTensors> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    const absl::Status failed = mine.Step(2, [&](Point point) -> absl::Status {
      if (point != Point::kReduced) return absl::OkStatus();
      ++reduced;
      while (rank == 2 && reduced < kWorld) std::this_thread::yield();
      return rank == 2 ? absl::InternalError("the loss is not a number") : absl::OkStatus();
    });
    EXPECT_FALSE(failed.ok());
    const absl::Status refused = Recover(mine.joinables(), *group[rank], Patient(failed)).status();
    EXPECT_THAT(
        std::string(refused.message()),
        HasSubstr("rank 0 was in the middle of an update of its part of the optimizer's state, "
                  "which cannot be taken back: resume from a checkpoint (none was written)"));
    mine.Destroy();
    return absl::OkStatus();
  });
}

TEST(ShardedRecoveryTest, WhoeverMayLoseStateGoesOnAlsoFromTheMiddleOfAnUpdate) {
  Group group = *CreateTestGroup(kWorld);
  std::atomic<int> reduced = 0;
  std::vector<std::vector<std::vector<float>>> values(kWorld);
  OnEach(kWorld, [&](int rank) -> absl::Status {
    Replica<WholeTensors> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule, LostShard::kFresh));
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    const absl::Status failed = mine.Step(2, [&](Point point) -> absl::Status {
      if (point != Point::kReduced) return absl::OkStatus();
      ++reduced;
      while (rank == 2 && reduced < kWorld) std::this_thread::yield();
      return rank == 2 ? Lost() : absl::OkStatus();
    });
    EXPECT_FALSE(failed.ok());
    if (rank == 2) {
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover(mine.joinables(), *group[rank], Patient(failed)));
    EXPECT_EQ(recovered.steps, 2);
    EK_RETURN_IF_ERROR(mine.Steps(2, kSteps));
    values[rank] = mine.model.values();
    mine.Destroy();
    return recovered.comm->Finalize();
  });
  EXPECT_EQ(values[1], values[0]);
  EXPECT_EQ(values[3], values[0]);
}

}  // namespace
}  // namespace evenkeel
