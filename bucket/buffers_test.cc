// BufferOptions and SyncBuffers(): the rank whose buffers count, and the steps; replicas that keep
// their initial state.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

// A rank's model and buffers.
class Replica {
 public:
  static absl::StatusOr<std::unique_ptr<Replica>> Create(Communicator& comm,
                                                         const DataParallelOptions& options) {
    auto replica = std::unique_ptr<Replica>(new Replica(comm.rank()));
    EK_ASSIGN_OR_RETURN(replica->ddp_,
                        DataParallel::Create(&comm, &replica->model_.params(),
                                             {TensorView(absl::MakeSpan(&replica->mean_, 1)),
                                              TensorView(absl::MakeSpan(&replica->count_, 1))},
                                             options));
    replica->ddp_->SetOptimizerState({});
    return replica;
  }
  static float MeanOf(int rank, int step) { return static_cast<float>(6 * (rank + 1) + step); }
  static int64_t CountOf(int rank, int step) { return 100 * (rank + 1) + step; }

  DataParallel& ddp() { return *ddp_; }
  ToyModel& model() { return model_; }
  float mean() const { return mean_; }
  int64_t count() const { return count_; }

  // As forward does it.
  void MoveBuffers(int step) {
    mean_ = MeanOf(rank_, step);
    count_ = CountOf(rank_, step);
  }
  absl::Status Step(int step, StepMode mode = StepMode::kSync, bool moves = false) {
    model_.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep(mode));
    begun_with_ = mean_;
    if (moves) MoveBuffers(step);
    EK_RETURN_IF_ERROR(
        model_.Backward(rank_, step, [this](int param) { return ddp_->GradientReady(param); }));
    return ddp_->FinishStep();
  }
  // The buffers after the last step had begun.
  float begun_with() const { return begun_with_; }

 private:
  explicit Replica(int rank) : rank_(rank), model_({3, 5}, /*seed=*/rank) {
    MoveBuffers(/*step=*/0);
  }

  const int rank_;
  ToyModel model_;
  float mean_ = 0, begun_with_ = 0;
  int64_t count_ = 0;
  std::unique_ptr<DataParallel> ddp_;
};

// Over the ranks from `first` on.
float Mean(int first, int world, int step) {
  float sum = 0;
  for (int rank = first; rank < world; ++rank) sum += Replica::MeanOf(rank, step);
  return sum / static_cast<float>(world - first);
}

class BuffersTest : public testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  void Run(const DataParallelOptions& options,
           absl::FunctionRef<absl::Status(Communicator&, Replica&)> body) {
    const absl::Status status = RunTestRanks(world(), [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto replica, Replica::Create(comm, options));
      return body(comm, *replica);
    });
    EXPECT_TRUE(status.ok()) << status;
  }
};

TEST_P(BuffersTest, WithoutSynchronisationEachRankHasItsOwn) {
  Run({.buffers = {.every = 0}}, [&](Communicator& comm, Replica& replica) -> absl::Status {
    const int rank = comm.rank();
    EXPECT_EQ(replica.model().values(), ToyModel({3, 5}).values());
    EXPECT_EQ(replica.mean(), Replica::MeanOf(rank, 0));
    EXPECT_FALSE(replica.ddp().WillSyncBuffers());
    for (const Collective& what : replica.ddp().StepSchedule().entries)
      EXPECT_EQ(what.role, Role::kBucket);
    for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
    EXPECT_EQ(replica.begun_with(), Replica::MeanOf(rank, 0));
    EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step <= rank; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
      return absl::OkStatus();
    }));
    EXPECT_EQ(replica.mean(), Replica::MeanOf(rank, 0));
    EXPECT_EQ(replica.count(), Replica::CountOf(rank, 0));
    return absl::OkStatus();
  });
}

TEST_P(BuffersTest, WithoutABroadcastOfTheInitialStateEachRankBeginsWithItsOwn) {
  Run({.broadcast_initial_state = false},
      [&](Communicator& comm, Replica& replica) -> absl::Status {
        const std::vector<std::vector<float>> own = ToyModel({3, 5}, /*seed=*/comm.rank()).values();
        EXPECT_EQ(replica.model().values(), own);
        EXPECT_EQ(replica.mean(), Replica::MeanOf(comm.rank(), 0));
        EK_RETURN_IF_ERROR(replica.Step(0));
        EXPECT_EQ(replica.model().values(), own);
        EXPECT_EQ(replica.begun_with(), Replica::MeanOf(0, 0))
            << "The first step broadcasts buffers as any other.";
        return absl::OkStatus();
      });
}

// Rank r has r + 1 inputs, but the last two have the same.
int StepsOf(int rank, int world) { return rank == world - 1 && world > 1 ? world - 1 : rank + 1; }

TEST_P(BuffersTest, TheMeanIsOverTheRanksWithInputs) {
  Run({.buffers = {.how = BufferSync::kAverage}},
      [&](Communicator& comm, Replica& replica) -> absl::Status {
        const int rank = comm.rank(), last = StepsOf(world() - 1, world()) - 1;
        EXPECT_EQ(replica.mean(), Replica::MeanOf(0, 0));
        replica.MoveBuffers(7);
        EK_RETURN_IF_ERROR(replica.Step(7));
        EXPECT_FLOAT_EQ(replica.begun_with(), Mean(0, world(), 7));
        EXPECT_EQ(replica.count(), Replica::CountOf(0, 7)) << "An integer has no mean.";
        EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < StepsOf(rank, world()); ++step) {
            replica.MoveBuffers(step);
            EK_RETURN_IF_ERROR(replica.Step(step));
            EXPECT_FLOAT_EQ(replica.begun_with(), Mean(step, world(), step))
                << "rank " << rank << " step " << step;
            EXPECT_EQ(replica.count(), Replica::CountOf(world() - 1, step));
          }
          replica.MoveBuffers(50);
          return absl::OkStatus();
        }));
        // Those that had inputs to the end count then.
        if (world() > 2) {
          EXPECT_FLOAT_EQ(replica.mean(), Mean(last, world(), 50)) << "rank " << rank;
        }
        return absl::OkStatus();
      });
}

// A rank's steps end with its own buffers. Those of the ranks that were active to the end count
// after the loop, however it ends: those of the highest one, or their mean.
TEST_P(BuffersTest, EveryLoopEndsWithEqualBuffers) {
  struct Case {
    std::string name;
    int fewer_from;  // The ranks that have 2 inputs, and not 4: from this one on.
    JoinOptions join;
    int last;  // The last rank that is active to the end.
  };
  const int w = world();
  std::vector<Case> cases = {{"even", w, {}, w - 1}};
  if (w > 1) {
    cases.push_back({"uneven", w - 1, {}, w - 2});
    cases.push_back({"stopped", w - 1, {.throw_on_early_termination = true}, w - 2});
    cases.push_back({"even with a stop", w, {.throw_on_early_termination = true}, w - 1});
    cases.push_back({"at least 2", 1, {.min_active_ranks = 2}, 0});
  }
  for (const Case& one : cases) {
    for (const BufferOptions buffers :
         {BufferOptions{}, BufferOptions{.how = BufferSync::kAverage}, BufferOptions{.every = 3}}) {
      SCOPED_TRACE(absl::StrCat(one.name, " every ", buffers.every));
      Run({.buffers = buffers}, [&](Communicator& comm, Replica& replica) -> absl::Status {
        const int rank = comm.rank();
        const absl::Status ended =
            RunJoined({&replica.ddp()}, one.join, [&](JoinScope&) -> absl::Status {
              for (int step = 0; step < (rank < one.fewer_from ? 4 : 2); ++step) {
                EK_RETURN_IF_ERROR(replica.Step(step));
                replica.MoveBuffers(step);
              }
              return absl::OkStatus();
            });
        if (!absl::IsOutOfRange(ended)) EK_RETURN_IF_ERROR(ended);
        const int step = absl::IsOutOfRange(ended) ? 1 : 3;
        const bool is_mean = buffers.how == BufferSync::kAverage;
        EXPECT_FLOAT_EQ(replica.mean(),
                        is_mean ? Mean(0, one.last + 1, step) : Replica::MeanOf(one.last, step))
            << "rank " << rank;
        EXPECT_EQ(replica.count(), Replica::CountOf(one.last, step)) << "rank " << rank;
        return absl::OkStatus();
      });
    }
  }
}

// The highest rank that has inputs in the step counts, or the mean of these ranks; outside of a
// loop rank 0.
TEST_P(BuffersTest, EveryStepEndsWithEqualBuffers) {
  for (const BufferSync how : {BufferSync::kBroadcast, BufferSync::kAverage}) {
    Run({.buffers = {.how = how, .when = BufferTime::kStepEnd}},
        [&](Communicator& comm, Replica& replica) -> absl::Status {
          const int rank = comm.rank(), last = comm.world_size() - 1;
          const auto expect = [&](int first, int root, int step) {
            EXPECT_FLOAT_EQ(replica.mean(), how == BufferSync::kAverage
                                                ? Mean(first, comm.world_size(), step)
                                                : Replica::MeanOf(root, step));
            EXPECT_EQ(replica.count(), Replica::CountOf(root, step));
          };
          EXPECT_FALSE(replica.ddp().WillSyncBuffers());
          EXPECT_EQ(replica.ddp().StepSchedule().entries.back().role, Role::kBuffers);
          for (int step = 1; step < 3; ++step) {
            EK_RETURN_IF_ERROR(replica.Step(step, StepMode::kSync, /*moves=*/true));
            expect(0, 0, step);
          }
          // Rank r has r + 1 inputs.
          EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step <= rank; ++step) {
              EK_RETURN_IF_ERROR(replica.Step(step, StepMode::kSync, /*moves=*/true));
              expect(step, last, step);
            }
            return absl::OkStatus();
          }));
          expect(last, last, last);
          // The last step of a loop accumulates.
          EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
            EK_RETURN_IF_ERROR(replica.Step(1, StepMode::kSync, /*moves=*/true));
            return replica.Step(2, StepMode::kAccumulate, /*moves=*/true);
          }));
          expect(0, last, 2);
          return absl::OkStatus();
        });
  }
}

TEST_P(BuffersTest, EveryNthStepEndsWithEqualBuffers) {
  Run({.buffers = {.every = 2, .when = BufferTime::kStepEnd}},
      [&](Communicator& comm, Replica& replica) -> absl::Status {
        for (int step = 0; step < 6; ++step) {
          EK_RETURN_IF_ERROR(replica.Step(step, StepMode::kSync, /*moves=*/true));
          EXPECT_EQ(replica.mean(), Replica::MeanOf(step % 2 == 1 ? 0 : comm.rank(), step)) << step;
          EK_RETURN_IF_ERROR(replica.Step(step, StepMode::kAccumulate, /*moves=*/true));
        }
        return absl::OkStatus();
      });
}

// The interval counts steps after a synchronising one; exhausted ranks count on.
TEST_P(BuffersTest, EveryNthStepBeginsWithOnes) {
  constexpr int kEvery = 3;
  Run({.buffers = {.every = kEvery}}, [&](Communicator& comm, Replica& replica) -> absl::Status {
    const int rank = comm.rank();
    int turn = 0;  // The group's.
    const auto step = [&](int root, StepMode mode, bool follows_sync) -> absl::Status {
      replica.MoveBuffers(turn);
      const bool is_due = follows_sync && turn % kEvery == 0;
      EXPECT_EQ(replica.ddp().WillSyncBuffers(), is_due) << turn;
      EK_RETURN_IF_ERROR(replica.Step(turn, mode));
      EXPECT_EQ(replica.begun_with(), Replica::MeanOf(is_due ? root : rank, turn))
          << "rank " << rank << " " << turn;
      turn += follows_sync;
      return absl::OkStatus();
    };
    bool follows_sync = true;
    for (const StepMode mode :
         {StepMode::kSync, StepMode::kSync, StepMode::kAccumulate, StepMode::kSync}) {
      EK_RETURN_IF_ERROR(step(/*root=*/0, mode, follows_sync));
      follows_sync = mode == StepMode::kSync;
    }
    for (int epoch = 0; epoch < 2; ++epoch) {
      const int begin = turn;
      const int first_gone = epoch == 0 ? 0 : world() - 1;  // Has one input, the others four.
      EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
        const int steps = rank == first_gone ? 1 : 4;
        for (int i = 0; i < steps; ++i) {
          const int highest =
              i > 0 && first_gone == world() - 1 && world() > 1 ? world() - 2 : world() - 1;
          EK_RETURN_IF_ERROR(step(highest, StepMode::kSync, true));
        }
        return absl::OkStatus();
      }));
      turn = begin + (world() > 1 ? 4 : 1);
    }
    return step(/*root=*/0, StepMode::kSync, true);
  });
}

TEST_P(BuffersTest, OnDemandExhaustedRanksFollow) {
  for (const BufferSync how : {BufferSync::kBroadcast, BufferSync::kAverage}) {
    Run({.buffers = {.how = how, .every = 0}},
        [&](Communicator& comm, Replica& replica) -> absl::Status {
          const int rank = comm.rank();
          const auto expected = [&](int root, int first, int step) {
            return how == BufferSync::kAverage ? Mean(first, world(), step)
                                               : Replica::MeanOf(root, step);
          };
          EK_RETURN_IF_ERROR(replica.ddp().SyncBuffers());
          EXPECT_FLOAT_EQ(replica.mean(), expected(/*root=*/0, /*first=*/0, 0));
          EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step <= rank; ++step) {
              replica.MoveBuffers(step);
              EK_RETURN_IF_ERROR(replica.Step(step));
              if (step % 2 == 0) continue;
              EK_RETURN_IF_ERROR(replica.ddp().SyncBuffers());
              EXPECT_FLOAT_EQ(replica.mean(), expected(world() - 1, step, step))
                  << "rank " << rank << " step " << step;
              EXPECT_EQ(replica.count(), Replica::CountOf(world() - 1, step));
            }
            return absl::OkStatus();
          }));
          const int last = (world() - 1) % 2 == 1 ? world() - 1 : world() - 2;  // The last time.
          if (last > 0 && rank < last) {
            EXPECT_FLOAT_EQ(replica.mean(), expected(world() - 1, last, last)) << "rank " << rank;
          }
          return absl::OkStatus();
        });
  }
}

TEST_P(BuffersTest, OnDemandMeansBetweenStepsOfALoop) {
  Run({}, [&](Communicator&, Replica& replica) -> absl::Status {
    EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
      const absl::Status early = replica.ddp().SyncBuffers();
      EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(early.message()),
                  HasSubstr("SyncBuffers(): Announce: no step has begun"));
      EK_RETURN_IF_ERROR(replica.ddp().BeginStep());
      const absl::Status inside = replica.ddp().SyncBuffers();
      EXPECT_EQ(inside.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(inside.message()), HasSubstr("call it after FinishStep()"));
      EK_RETURN_IF_ERROR(replica.model().Backward(
          0, 0, [&](int param) { return replica.ddp().GradientReady(param); }));
      return replica.ddp().FinishStep();
    }));
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, BuffersTest, testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace evenkeel
