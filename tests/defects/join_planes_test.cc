// Where join of other systems leaks into what it surrounds: its configuration outlives the loop,
// its small collectives pair with the user's, an error is everyone's timeout, buffers come from a
// rank that is behind.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

// A rank's replica, and its step.
struct Replica {
  ToyModel model{{3, 7, 1}};
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;

  absl::Status Init(Communicator& comm) {
    EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&comm, &model.params(), model.buffers()));
    EK_ASSIGN_OR_RETURN(optimizer, Optimizer::Create(comm, model.params(),
                                                     Sgd{.learning_rate = 0.1, .momentum = 0.9}));
    return absl::OkStatus();
  }
  absl::Status Step(int rank, int batch) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.Forward(rank, batch);
    EK_RETURN_IF_ERROR(
        model.Backward(rank, batch, [&](int param) { return ddp->GradientReady(param); }));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    return optimizer->Step();
  }
  std::vector<Joinable*> list() { return {ddp.get(), optimizer.get()}; }
};

class JoinPlanesTest : public testing::TestWithParam<int> {};

// Elsewhere a model goes on to send a count in each step, until another loop replaces its settings.
TEST_P(JoinPlanesTest, AfterTheLoopAModelIsUsedAsIfThereHadBeenNone) {
  const int world = GetParam();
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica replica;
    EK_RETURN_IF_ERROR(replica.Init(comm));
    for (const bool fails_early : {false, true}) {
      const absl::Status ended =
          RunJoined(replica.list(), {.throw_on_early_termination = fails_early},
                    [&](JoinScope&) -> absl::Status {
                      const int steps = fails_early ? 1 : 1 + comm.rank();
                      for (int step = 0; step < steps; ++step) {
                        EK_RETURN_IF_ERROR(replica.Step(comm.rank(), step));
                      }
                      return fails_early ? absl::OutOfRangeError("enough") : absl::OkStatus();
                    });
      if (fails_early) break;  // The group has ended with the loop's own error.
      EK_RETURN_IF_ERROR(ended);
      EXPECT_FALSE(replica.ddp->join_config().enable);
      EXPECT_FALSE(replica.ddp->join_config().in_loop);
      EXPECT_FALSE(StepControl::Of(comm).in_loop());
      // The buffers' root is rank 0 again, and the records have no scope.
      EK_RETURN_IF_ERROR(replica.Step(comm.rank(), 50));
      EK_ASSIGN_OR_RETURN(const StepAnswer answer, StepControl::Of(comm).current()->Wait());
      for (const StepRecord& record : *answer.records) EXPECT_EQ(record.scope_hash, 0u);
      EXPECT_EQ(answer.active, world);
    }
    EXPECT_FALSE(replica.ddp->join_config().enable);
    EXPECT_EQ(replica.optimizer->join_config().min_active_ranks, 1);
    EXPECT_FALSE(StepControl::Of(comm).in_loop());
    return absl::OkStatus();
  });
  EXPECT_FALSE(status.ok()) << "the second loop's own error has ended the group";
}

TEST_P(JoinPlanesTest, AnErrorOfOneRankIsEveryonesAtOnceWithItsCause) {
  const int world = GetParam();
  std::vector<absl::Status> results(world);
  absl::Time failed;
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica replica;
    EK_RETURN_IF_ERROR(replica.Init(comm));
    return results[comm.rank()] = RunJoined(replica.list(), {}, [&](JoinScope&) -> absl::Status {
             for (int step = 0; step < 6; ++step) {
               if (comm.rank() == world - 1 && step == 2) {
                 failed = absl::Now();
                 return absl::DataLossError("sample 17 is broken");
               }
               if (comm.rank() == 0 && world > 2 && step == 1)
                 break;  // One of them is exhausted already.
               EK_RETURN_IF_ERROR(replica.Step(comm.rank(), step));
             }
             return absl::OkStatus();
           });
  });
  EXPECT_FALSE(status.ok());
  EXPECT_LT(absl::Now() - failed, absl::Seconds(5));
  for (int rank = 0; rank < world - 1; ++rank) {
    EXPECT_THAT(std::string(results[rank].message()),
                HasSubstr(absl::StrCat("rank ", world - 1, " failed in step 2 of its loop")));
    EXPECT_THAT(std::string(results[rank].message()), HasSubstr("sample 17 is broken"));
  }
}

// Elsewhere rank 0's, also when it is exhausted and is behind.
TEST_P(JoinPlanesTest, BuffersComeFromARankThatHasInputs) {
  const int world = GetParam();
  auto steps_of = [&](int rank) { return rank == 0 ? 1 : 2 * (world - rank) + 1; };
  // The result of one process: before each step all have the highest active rank's buffer; at the
  // end, all have that of the last one.
  std::vector<ToyModel> alone;
  for (int rank = 0; rank < world; ++rank) alone.emplace_back(std::vector<int>{1});
  int highest = 0;
  for (int step = 0; step < (world == 1 ? 1 : steps_of(1)); ++step) {
    for (int rank = 0; rank < world; ++rank) highest = step < steps_of(rank) ? rank : highest;
    const std::vector<float> buffer = alone[highest].buffer();
    for (int rank = 0; rank < world; ++rank) {
      alone[rank].buffer() = buffer;
      if (step < steps_of(rank)) alone[rank].Forward(rank, step);
    }
  }
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica replica;
    EK_RETURN_IF_ERROR(replica.Init(comm));
    EK_RETURN_IF_ERROR(RunJoined(replica.list(), {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < steps_of(comm.rank()); ++step)
        EK_RETURN_IF_ERROR(replica.Step(comm.rank(), step));
      return absl::OkStatus();
    }));
    EXPECT_EQ(replica.model.buffer(), alone[highest].buffer()) << "rank " << comm.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A count of floats, like the one that other systems' join sends: they would take each other's.
TEST_P(JoinPlanesTest, TheUsersCollectivesAreNeverTakenForJoins) {
  const int world = GetParam();
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica replica;
    EK_RETURN_IF_ERROR(replica.Init(comm));
    return RunJoined(replica.list(), {}, [&](JoinScope& scope) -> absl::Status {
      for (int step = 0; step <= comm.rank(); ++step) {
        float count = 1;
        int64_t rank = comm.rank();
        EK_RETURN_IF_ERROR(scope.AllReduce(TensorView(absl::MakeSpan(&count, 1)), ReduceOp::kSum));
        EK_RETURN_IF_ERROR(replica.Step(comm.rank(), step));
        EK_RETURN_IF_ERROR(scope.Barrier());
        EK_RETURN_IF_ERROR(scope.AllReduce(TensorView(absl::MakeSpan(&rank, 1)), ReduceOp::kMax));
        EXPECT_EQ(count, static_cast<float>(world - step));
        EXPECT_EQ(rank, world - 1);
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinPlanesTest, ABarrierOnTheBareCommunicatorIsAnErrorThatNamesIt) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "no rank is exhausted before the others";
  std::vector<absl::Status> results(world);
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica replica;
    EK_RETURN_IF_ERROR(replica.Init(comm));
    return results[comm.rank()] = RunJoined(replica.list(), {}, [&](JoinScope&) -> absl::Status {
             for (int step = 0; step < 2 + comm.rank(); ++step) {
               EK_RETURN_IF_ERROR(comm.Barrier());
               EK_RETURN_IF_ERROR(replica.Step(comm.rank(), step));
             }
             return absl::OkStatus();
           });
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& result : results)
    EXPECT_THAT(std::string(result.message()), HasSubstr("barrier"));
}

// Elsewhere two or three all-reduces per step and two at the end. Here the end has one broadcast,
// of the buffers.
TEST_P(JoinPlanesTest, AStepHasNoMoreCollectivesThanWithoutJoin) {
  const absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Replica replica;
    EK_RETURN_IF_ERROR(replica.Init(comm));
    auto issued = [&]() -> absl::StatusOr<int64_t> {
      int64_t sum = 0;
      for (const std::string& name :
           {replica.ddp->join_name(), absl::StrCat(replica.ddp->join_name(), ".state"),
            replica.optimizer->join_name(), std::string("user"), std::string("join scope")}) {
        EK_ASSIGN_OR_RETURN(Channel* const channel, comm.OpenChannel(name));
        sum += channel->position();
      }
      return sum;
    };
    auto loop = [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 5; ++step) EK_RETURN_IF_ERROR(replica.Step(comm.rank(), step));
      return absl::OkStatus();
    };
    EK_RETURN_IF_ERROR(replica.Step(comm.rank(), 9));  // Plans change after the first step.
    EK_RETURN_IF_ERROR(replica.Step(comm.rank(), 9));
    EK_ASSIGN_OR_RETURN(const int64_t before, issued());
    JoinScope none(&comm, /*is_followed=*/false);
    EK_RETURN_IF_ERROR(loop(none));
    EK_ASSIGN_OR_RETURN(const int64_t without, issued());
    int64_t in_loop = 0;
    EK_RETURN_IF_ERROR(RunJoined(replica.list(), {}, [&](JoinScope& scope) -> absl::Status {
      EK_RETURN_IF_ERROR(loop(scope));
      EK_ASSIGN_OR_RETURN(in_loop, issued());
      return absl::OkStatus();
    }));
    EK_ASSIGN_OR_RETURN(const int64_t with, issued());
    EXPECT_GT(without, before);
    EXPECT_EQ(in_loop - without, without - before);
    EXPECT_EQ(with - in_loop, 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, JoinPlanesTest, testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace evenkeel
