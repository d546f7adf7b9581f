// Recovery in uneven loops, with an optimizer of the user's own, more than once, and where it is
// refused.

#include <algorithm>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/state_sync.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/tests/recovery/replica.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const UpdateRule kRule = Adam{.learning_rate = 0.01};

RecoveryOptions Patient(int64_t steps = -1, const absl::Status& why = absl::OkStatus()) {
  return {.timeout = absl::Seconds(60), .steps = steps, .why = why};
}

// Runs steps `first` to `end` in a joined loop; step `fails_in` does in the middle of backward.
absl::Status JoinedSteps(Replica<>& mine, int first, int end, int fails_in = -1) {
  return RunJoined(mine.joinables(), {}, [&](JoinScope&) -> absl::Status {
    for (int step = first; step < end; ++step) {
      EK_RETURN_IF_ERROR(mine.Step(step, [&](Point point) {
        return step == fails_in && point == Point::kBackward ? Lost() : absl::OkStatus();
      }));
    }
    return absl::OkStatus();
  });
}

struct Outcome {
  std::vector<std::vector<float>> values;
  std::vector<float> buffer;
  OptimizerState state;
};

// Rank 0 is exhausted when rank 1 is lost; rank 2 becomes exhausted afterwards.
TEST(RecoveryUsesTest, AnUnevenLoopGoesOnWithItsDryRanks) {
  const std::vector<int> inputs = {2, 6, 4, 6};
  constexpr int kFailsIn = 3;
  Group group = *CreateTestGroup(4);
  std::vector<Outcome> outcomes(4), expected(4);
  OnEach(4, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    const absl::Status failed = JoinedSteps(mine, 0, inputs[rank], rank == 1 ? kFailsIn : -1);
    EXPECT_FALSE(failed.ok());
    if (rank == 1) {
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    EXPECT_THAT(std::string(failed.message()),
                HasSubstr("rank 1 failed in step 4 of its loop: this rank"));
    EXPECT_EQ(mine.optimizer->steps_finished(), kFailsIn);
    EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(mine.joinables(), *group[rank], Patient()));
    EXPECT_EQ(recovered.steps, kFailsIn);
    EK_RETURN_IF_ERROR(JoinedSteps(mine, kFailsIn, inputs[rank]));
    outcomes[rank] = {mine.model.values(), mine.model.buffer(), mine.optimizer->state()};
    mine.Destroy();
    return recovered.comm->Finalize();
  });

  std::vector<Replica<>> replicas(4);
  std::vector<OptimizerState> states(4);
  absl::Status status = RunTestRanks(4, [&](Communicator& comm) -> absl::Status {
    Replica<>& mine = replicas[comm.rank()];
    EK_RETURN_IF_ERROR(mine.Create(comm, kRule));
    EK_RETURN_IF_ERROR(JoinedSteps(mine, 0, std::min(inputs[comm.rank()], kFailsIn)));
    states[comm.rank()] = mine.optimizer->state();
    mine.Destroy();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    const int old_rank = comm.rank() + (comm.rank() >= 1);
    Replica<>& mine = replicas[old_rank];
    EK_RETURN_IF_ERROR(mine.Create(comm, kRule));
    EK_RETURN_IF_ERROR(mine.optimizer->LoadState(states[old_rank]));
    EK_RETURN_IF_ERROR(JoinedSteps(mine, kFailsIn, inputs[old_rank]));
    expected[old_rank] = {mine.model.values(), mine.model.buffer(), mine.optimizer->state()};
    mine.Destroy();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  for (int rank : {0, 2, 3}) {
    SCOPED_TRACE(rank);
    EXPECT_THAT(outcomes[rank].values, SameValues(expected[rank].values));
    EXPECT_EQ(outcomes[rank].buffer, expected[rank].buffer);
    EXPECT_TRUE(internal::IsSame(outcomes[rank].state, expected[rank].state));
  }
}

// A model with a momentum that only its user knows.
struct OwnOptimizer {
  ToyModel model{kSizes};
  std::vector<std::vector<float>> velocity;
  std::unique_ptr<DataParallel> ddp;
  int64_t steps = 0;

  absl::Status Create(Communicator& comm) {
    EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&comm, &model.params(), {}));
    for (int size : kSizes) velocity.emplace_back(size, 0.0f);
    return absl::OkStatus();
  }
  std::vector<TensorView> State() {
    std::vector<TensorView> views;
    for (std::vector<float>& tensor : velocity) views.emplace_back(absl::MakeSpan(tensor));
    return views;
  }
  absl::Status Step(bool fails) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    EK_RETURN_IF_ERROR(
        model.Backward(ddp->communicator().rank(), static_cast<int>(steps), [&](int param) {
          return fails && param == 2 ? LostWithinTheStep(ddp->communicator())
                                     : ddp->GradientReady(param);
        }));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    for (int p = 0; p < model.params().size(); ++p) {
      const auto value = model.params()[p].value.as<float>(),
                 grad = model.params()[p].grad.as<float>();
      for (size_t j = 0; j < value.size(); ++j)
        value[j] -= velocity[p][j] = 0.5f * velocity[p][j] + 0.25f * grad[j];
    }
    ++steps;
    return absl::OkStatus();
  }
};

TEST(RecoveryUsesTest, AnOptimizerOfTheUsersOwnNamesItsStateAndCountsItsSteps) {
  Group group = *CreateTestGroup(4);
  std::vector<OwnOptimizer> ranks(4);
  OnEach(4, [&](int rank) -> absl::Status {
    OwnOptimizer& mine = ranks[rank];
    EK_RETURN_IF_ERROR(mine.Create(*group[rank]));
    for (int i = 0; i < 3; ++i) EK_RETURN_IF_ERROR(mine.Step(false));
    const absl::Status failed = mine.Step(rank == 0);
    EXPECT_FALSE(failed.ok());
    if (rank == 0) {
      mine.ddp.reset();
      group[rank].reset();
      return absl::OkStatus();
    }
    const absl::Status refused = Recover({mine.ddp.get()}, *group[rank], Patient()).status();
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("set RecoveryOptions::steps to the number of steps that this rank"));
    // Once more, with what was missing. The state of rank 1 is damaged, which is rank 0 now.
    mine.ddp->SetOptimizerState(mine.State());
    if (rank == 1) mine.velocity[0][0] += 1;
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover({mine.ddp.get()}, *group[rank], Patient(mine.steps)));
    EXPECT_EQ(recovered.steps, 3);
    EXPECT_THAT(recovered.repaired,
                ElementsAre("data_parallel#0: replicas differ after step 3: \"optimizer state 0\" "
                            "(tensor 5) differs on rank 1"));
    EXPECT_EQ(recovered.source, 1);
    for (int i = 0; i < 2; ++i) EK_RETURN_IF_ERROR(mine.Step(false));
    mine.ddp.reset();
    return recovered.comm->Finalize();
  });
  EXPECT_EQ(ranks[1].velocity, ranks[3].velocity);
  EXPECT_EQ(ranks[2].velocity, ranks[3].velocity);
  EXPECT_EQ(ranks[1].model.values(), ranks[3].model.values());
}

TEST(RecoveryUsesTest, OfTwoRanksThatDifferNoneIsTaken) {
  Group group = *CreateTestGroup(3);
  OnEach(3, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], Sgd{.momentum = 0.9}));
    EK_RETURN_IF_ERROR(mine.Steps(0, 3));
    const absl::Status failed = mine.Step(3, [&](Point point) {
      return rank == 2 && point == Point::kForward ? LostWithinTheStep(*group[rank])
                                                   : absl::OkStatus();
    });
    EXPECT_FALSE(failed.ok());
    if (rank == 2) {
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    if (rank == 1) mine.model.params()[1].value.as<float>()[0] *= 2;
    const absl::Status refused = Recover(mine.joinables(), *group[rank], Patient()).status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("\"p1\" (tensor 1): ranks 0 and 1 differ: no rank is known to be right"));
    mine.Destroy();
    return absl::OkStatus();
  });
}

// Sends, at the end of a loop, the first of a rank's two buffers in place of its DataParallel, and
// is lost then.
class SendsHalf : public Joinable {
 public:
  SendsHalf(Communicator* comm, int lost_rank, std::vector<TensorView> buffers)
      : Joinable(comm, "before"), lost_rank_(lost_rank), buffers_(std::move(buffers)) {}
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }
  JoinPhase join_phase() const override { return JoinPhase::kGradients; }

 private:
  struct Hook : JoinHook {
    explicit Hook(SendsHalf* owner) : owner(owner) {}
    absl::Status PostHook(bool /*is_last_joiner*/) override {
      Communicator& comm = owner->communicator();
      return comm.rank() == owner->lost_rank_ ? owner->Send(comm) : absl::OkStatus();
    }
    SendsHalf* const owner;
  };
  absl::Status Send(Communicator& comm) const {
    // As DataParallel::EndJoin() writes it: this rank was active to the end of the loop, and each
    // parameter is trained and reduced.
    const std::string message(1 + 2 * kSizes.size(), '1');
    EK_RETURN_IF_ERROR(
        comm.control().Exchange("join/data_parallel#0", message, comm.timeout()).status());
    EK_ASSIGN_OR_RETURN(Channel* const channel, comm.OpenChannel("data_parallel#0.state"));
    Collective what = PlanStateSync(buffers_, BufferSync::kBroadcast, Role::kState)[0];
    what.root = lost_rank_;
    EK_RETURN_IF_ERROR(channel->Issue(what, {buffers_[0]}, {buffers_[0]}, {}).Wait());
    return Lost();
  }
  const int lost_rank_;
  const std::vector<TensorView> buffers_;
};

TEST(RecoveryUsesTest, ALossAtTheEndOfALoopLeavesTheBuffersOfOneRank) {
  Group group = *CreateTestGroup(3);
  OnEach(3, [&](int rank) -> absl::Status {
    ToyModel model(kSizes);
    float mean = 0;
    int64_t count = 0;
    const std::vector<TensorView> buffers = {TensorView(absl::MakeSpan(&mean, 1)),
                                             TensorView(absl::MakeSpan(&count, 1))};
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(group[rank].get(), &model.params(), buffers));
    ddp->SetOptimizerState({});
    SendsHalf half(group[rank].get(), /*lost_rank=*/2, buffers);
    const absl::Status failed = RunJoined({&half, ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(
          model.Backward(rank, 0, [&](int param) { return ddp->GradientReady(param); }));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      mean = static_cast<float>(rank + 1);
      count = rank + 1;
      return absl::OkStatus();
    });
    EXPECT_FALSE(failed.ok());
    if (rank == 2) {
      // Otherwise the ranks disagreed about its broadcast, and no buffer was written.
      EXPECT_THAT(std::string(failed.message()), HasSubstr(Lost().message()));
      ddp.reset();
      group[rank].reset();
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(Recovered recovered, Recover({ddp.get()}, *group[rank], Patient(1)));
    EXPECT_EQ(mean, 2);
    EXPECT_EQ(count, 2);
    ddp.reset();
    return recovered.comm->Finalize();
  });
}

// The rank whose buffers count is lost when it has ended a step.
TEST(RecoveryUsesTest, BuffersThatAStepEndsWithAreNotLostWithARank) {
  Group group = *CreateTestGroup(3);
  ToyModel expected(kSizes);
  for (int step = 0; step < 2; ++step) expected.Forward(/*rank=*/0, step);
  OnEach(3, [&](int rank) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(group[rank].get(), &model.params(), model.buffers(),
                                             {.buffers = {.when = BufferTime::kStepEnd}}));
    ddp->SetOptimizerState({});
    const auto run = [&](int step, bool is_lost) -> absl::Status {
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      model.Forward(ddp->communicator().rank(), step);
      EK_RETURN_IF_ERROR(model.Backward(rank, step, [&](int param) {
        return is_lost ? LostWithinTheStep(ddp->communicator()) : ddp->GradientReady(param);
      }));
      return ddp->FinishStep();
    };
    for (int step = 0; step < 2; ++step) EK_RETURN_IF_ERROR(run(step, false));
    EXPECT_FALSE(run(2, rank == 0).ok());
    if (rank == 0) {
      ddp.reset();
      group[rank].reset();
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(Recovered recovered, Recover({ddp.get()}, *group[rank], Patient(2)));
    EXPECT_EQ(model.buffer(), expected.buffer());
    ddp.reset();
    return recovered.comm->Finalize();
  });
}

TEST(RecoveryUsesTest, RanksAreLostOneAfterTheOther) {
  Group group = *CreateTestGroup(4);
  std::vector<std::vector<std::vector<float>>> values(4);
  OnEach(4, [&](int rank) -> absl::Status {
    std::unique_ptr<Communicator> comm = std::move(group[rank]);
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*comm, kRule));
    int step = 0;
    for (int last = 3; last >= 1; --last) {  // The last rank of the group goes, until one is left.
      EK_RETURN_IF_ERROR(mine.Steps(step, step + 2));
      step += 2;
      const bool is_lost = comm->rank() == last;
      EXPECT_FALSE(mine.Step(step,
                             [&](Point point) {
                               return is_lost && point == Point::kBackward ? Lost()
                                                                           : absl::OkStatus();
                             })
                       .ok());
      if (is_lost) {
        mine.Destroy();
        return absl::OkStatus();
      }
      EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(mine.joinables(), *comm, Patient()));
      EXPECT_THAT(recovered.lost, ElementsAre(last));
      EXPECT_EQ(recovered.steps, step);
      comm = std::move(recovered.comm);
    }
    EK_RETURN_IF_ERROR(mine.Steps(step, step + 2));
    EXPECT_EQ(comm->world_size(), 1);
    mine.Destroy();
    return comm->Finalize();
  });
}

// It is there when the survivors agree on who they are, and gone before they have one state.
TEST(RecoveryUsesTest, ARankThatIsLostWhileTheOthersRecoverIsLeftBehindToo) {
  for (int late : {0, 1, 2}) {
    Group group = *CreateTestGroup(4);
    OnEach(4, [&](int rank) -> absl::Status {
      Replica<> mine;
      EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
      EK_RETURN_IF_ERROR(mine.Steps(0, 3));
      const bool is_lost = rank == 3;
      EXPECT_FALSE(mine.Step(3,
                             [&](Point point) {
                               return is_lost && point == Point::kBackward ? Lost()
                                                                           : absl::OkStatus();
                             })
                       .ok());
      if (is_lost) {
        mine.Destroy();
        group[rank].reset();
        return absl::OkStatus();
      }
      if (rank == late) {
        EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> next,
                            group[rank]->Shrink(absl::Seconds(60)));
        next.reset();
        mine.Destroy();
        return absl::OkStatus();
      }
      EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(mine.joinables(), *group[rank], Patient()));
      EXPECT_THAT(recovered.lost, ElementsAre(late, 3));
      EXPECT_EQ(recovered.comm->world_size(), 2);
      EK_RETURN_IF_ERROR(mine.Steps(3, 5));
      mine.Destroy();
      return recovered.comm->Finalize();
    });
  }
}

// Its TakeOver() comes when the parameters have been sent, and before the optimizer's state.
class DiesInTheTransfer : public Joinable {
 public:
  explicit DiesInTheTransfer(Communicator* comm, bool dies)
      : Joinable(comm, "between"), dies_(dies) {}
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }

 private:
  absl::Status TakeOver(StateTransfer&) override {
    if (!dies_) return absl::OkStatus();
    communicator().Abort(absl::UnavailableError("as if it were killed"));
    return Lost();
  }

  const bool dies_;
};

// It went back to the step of the source, whose state has overwritten a part of its own.
TEST(RecoveryUsesTest, ARankHasItsOwnStateAgainIfTheSourceIsLostInTheTransfer) {
  Group group = *CreateTestGroup(3);
  absl::Notification has_finished;  // Rank 0 its step.
  OnEach(3, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    auto between = std::make_unique<DiesInTheTransfer>(group[rank].get(), rank == 1);
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    // Only rank 0 finishes this one.
    const absl::Status ended = mine.Step(2, [&](Point point) {
      if (rank == 0 || point != Point::kReduced) return absl::OkStatus();
      has_finished.WaitForNotification();
      return Lost();
    });
    if (rank == 0) has_finished.Notify();
    EXPECT_EQ(ended.ok(), rank == 0);
    const std::vector<std::vector<float>> values = mine.model.values();
    const OptimizerState state = mine.optimizer->state();
    std::vector<Joinable*> joinables = mine.joinables();
    joinables.push_back(between.get());
    if (rank == 2) {
      between.reset();
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    RecoveryOptions options = Patient();
    options.why = absl::UnavailableError("rank 2 is lost");
    absl::StatusOr<Recovered> recovered = Recover(joinables, *group[rank], options);
    EXPECT_EQ(recovered.ok(), rank == 0) << recovered.status();
    if (recovered.ok()) {
      EXPECT_EQ(recovered->steps, 3);
      EXPECT_THAT(recovered->lost, ElementsAre(1, 2));
      EXPECT_EQ(mine.model.values(), values);
      EXPECT_TRUE(internal::IsSame(mine.optimizer->state(), state));
    }
    between.reset();
    mine.Destroy();
    return rank == 0 ? recovered->comm->Finalize() : absl::OkStatus();
  });
}

// Rank 0 goes back one step, to that of the others, twice: rank 1 is lost in the first transfer.
TEST(RecoveryUsesTest, BuffersGoBackAsFarWhenTheTransferIsRepeated) {
  Group group = *CreateTestGroup(4);
  absl::Notification has_finished;  // Rank 0 its step.
  std::vector<float> expected;      // Rank 0's before that step.
  absl::Notification is_expected;
  OnEach(4, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    auto between = std::make_unique<DiesInTheTransfer>(group[rank].get(), rank == 1);
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    if (rank == 0) {
      expected = mine.model.buffer();
      is_expected.Notify();
    }
    const absl::Status ended = mine.Step(2, [&](Point point) {
      if (rank == 0 || point != Point::kReduced) return absl::OkStatus();
      has_finished.WaitForNotification();
      return Lost();
    });
    if (rank == 0) has_finished.Notify();
    EXPECT_EQ(ended.ok(), rank == 0);
    std::vector<Joinable*> joinables = mine.joinables();
    joinables.push_back(between.get());
    if (rank == 3) {
      between.reset();
      mine.Destroy();
      group[rank].reset();
      return absl::OkStatus();
    }
    RecoveryOptions options = Patient();
    options.why = absl::UnavailableError("rank 3 is lost");
    absl::StatusOr<Recovered> recovered = Recover(joinables, *group[rank], options);
    EXPECT_EQ(recovered.ok(), rank != 1) << recovered.status();
    if (recovered.ok()) {
      EXPECT_EQ(recovered->steps, 2);
      EXPECT_THAT(recovered->lost, ElementsAre(1, 3));
      is_expected.WaitForNotification();
      EXPECT_EQ(mine.model.buffer(), expected) << "rank " << rank;
    }
    between.reset();
    mine.Destroy();
    return recovered.ok() ? recovered->comm->Finalize() : absl::OkStatus();
  });
}

// It is told who the survivors are, itself included, and never comes to their group.
TEST(RecoveryUsesTest, ARankThatIsLostOnItsWayToTheNewGroupIsLeftBehindToo) {
  Group group = *CreateTestGroup(4);
  OnEach(4, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    const bool is_lost = rank == 3;
    EXPECT_FALSE(mine.Step(0,
                           [&](Point point) {
                             return is_lost && point == Point::kBackward ? Lost()
                                                                         : absl::OkStatus();
                           })
                     .ok());
    if (is_lost || rank == 1) {
      mine.Destroy();
      const auto survivors = is_lost ? absl::StatusOr<to_rank::Regrouped>(to_rank::Regrouped())
                                     : group[rank]->control().Regroup(absl::Seconds(20));
      group[rank].reset();
      return survivors.status();
    }
    // Rank 1 has a third of the timeout to arrive.
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover(mine.joinables(), *group[rank], {.timeout = absl::Seconds(6)}));
    EXPECT_THAT(recovered.lost, ElementsAre(1, 3));
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    mine.Destroy();
    return recovered.comm->Finalize();
  });
}

// One is in the new group, lives, and says nothing: the group's own deadline is minutes away.
TEST(RecoveryUsesTest, ARankThatKeepsTheOthersWaitingEndsTheRecoveryInTime) {
  Group group = *CreateTestGroup(2);
  OnEach(2, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    if (rank == 0) group[rank]->Abort(Lost());
    while (group[rank]->status().ok()) std::this_thread::yield();
    if (rank == 1) {
      EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> next,
                          group[rank]->Shrink(absl::Seconds(20)));
      while (next->status().ok()) std::this_thread::yield();
      mine.Destroy();
      return absl::OkStatus();
    }
    const absl::Status late =
        Recover(mine.joinables(), *group[rank], {.timeout = absl::Seconds(1)}).status();
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
    mine.Destroy();
    return absl::OkStatus();
  });
}

// A rank may have changed a setting for the step that failed: all go on with those of the rank
// whose state they take.
TEST(RecoveryUsesTest, AnErrorOfOnesOwnLosesNobody) {
  Group group = *CreateTestGroup(3);
  OnEach(3, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    const absl::Status failed = mine.Step(2, [&](Point point) -> absl::Status {
      if (rank != 1 || point != Point::kForward) return absl::OkStatus();
      EK_RETURN_IF_ERROR(mine.optimizer->SetLearningRate(0.5));
      return absl::DataLossError("an image cannot be read");
    });
    EXPECT_THAT(std::string(failed.message()), HasSubstr(rank == 1 ? "cannot be read" : "rank 1 "));
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover(mine.joinables(), *group[rank], Patient(-1, failed)));
    EXPECT_THAT(recovered.lost, IsEmpty());
    EXPECT_EQ(recovered.steps, 2);
    EXPECT_EQ(std::get<Adam>(mine.optimizer->groups().rule_of(0)).learning_rate, 0.1 / 3);
    EK_RETURN_IF_ERROR(mine.Steps(2, 4));
    mine.Destroy();
    return recovered.comm->Finalize();
  });
}

// A rank freezes a parameter for the step that fails, and fails before it begins that step. It is
// the rank whose state the others take.
TEST(RecoveryUsesTest, WhatIsFrozenForTheStepThatFailsIsFrozenInItsRepetition) {
  for (const bool is_repeated : {true, false}) {  // By the program, before the repetition.
    SCOPED_TRACE(is_repeated);
    Group group = *CreateTestGroup(3);
    std::vector<std::vector<std::vector<float>>> values(3);
    std::latch stepped(3);
    OnEach(3, [&](int rank) -> absl::Status {
      Replica<> mine;
      EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
      ParameterSet& params = mine.model.params();
      EK_RETURN_IF_ERROR(mine.Steps(0, 2));
      const std::vector<std::vector<float>> before = mine.model.values();
      stepped.arrive_and_wait();  // The error of rank 0 is that of the next step.
      params.SetTrainable("p1", false);
      absl::Status failed = absl::DataLossError("an image cannot be read");
      if (rank != 0) failed = mine.Step(2, [](Point) { return absl::OkStatus(); });
      EXPECT_THAT(std::string(failed.message()),
                  HasSubstr(rank == 0 ? "cannot be read" : "rank 0"));
      EK_ASSIGN_OR_RETURN(Recovered recovered,
                          Recover(mine.joinables(), *group[rank], Patient(-1, failed)));
      EXPECT_EQ(recovered.steps, 2);
      if (is_repeated) params.SetTrainable("p1", false);
      EXPECT_FALSE(params.trainable(1));
      EK_RETURN_IF_ERROR(mine.Steps(2, 4));
      EXPECT_EQ(mine.model.values()[1], before[1]) << "frozen";
      EXPECT_NE(mine.model.values()[2], before[2]) << "trained";
      params.SetTrainable("p1", true);
      EK_RETURN_IF_ERROR(mine.Steps(4, 5));
      EXPECT_NE(mine.model.values()[1], before[1]) << "trained again";
      values[rank] = mine.model.values();
      mine.Destroy();
      return recovered.comm->Finalize();
    });
    EXPECT_EQ(values[1], values[0]);
    EXPECT_EQ(values[2], values[0]);
  }
}

// Fails in the second bucket, when every rank has updated the first.
class FailsInTheSecondBucket : public AllReduceBuckets {
 public:
  FailsInTheSecondBucket(const bool* fails, std::latch* updated)
      : fails_(fails), updated_(updated) {}
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override {
    if (!*fails_ || bucket.index != 1) return AllReduceBuckets::OnReduced(bucket, step);
    updated_->arrive_and_wait();
    return Lost();
  }

 private:
  const bool* const fails_;
  std::latch* const updated_;
};

// A repetition of the step would update the parameters of the first bucket twice. With a part in
// backward, also if Step() alone is missing.
TEST(RecoveryUsesTest, AnUpdateInBackwardThatNoRankHasEndedIsRefused) {
  for (const bool is_part : {false, true}) {
    SCOPED_TRACE(is_part);
    Group group = *CreateTestGroup(3);
    std::latch updated(3);
    OnEach(3, [&](int rank) -> absl::Status {
      ToyModel model(kSizes);
      bool fails = false;
      EK_ASSIGN_OR_RETURN(auto optimizer,
                          Optimizer::Create(*group[rank], model.params(), kRule,
                                            {.placement = Replicated{.update_in_backward = true}}));
      ReductionOptions how{.inner = std::make_unique<FailsInTheSecondBucket>(&fails, &updated)};
      if (is_part) how.params = {3, 4};
      EK_ASSIGN_OR_RETURN(auto reduction, optimizer->TakeReduction(std::move(how)));
      EK_ASSIGN_OR_RETURN(
          auto ddp,
          DataParallel::Create(group[rank].get(), &model.params(), {},
                               {.reducer = {.caps = {Bytes{8}, Bytes{24}}}}, std::move(reduction)));
      const auto backward = [&](int number) -> absl::Status {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(
            model.Backward(rank, number, [&](int param) { return ddp->GradientReady(param); }));
        return ddp->FinishStep();
      };
      EK_RETURN_IF_ERROR(backward(0));
      if (is_part) EK_RETURN_IF_ERROR(optimizer->Step());
      const std::vector<std::vector<float>> before = model.values();
      fails = !is_part;
      absl::Status failed = backward(1);
      if (is_part) {
        EK_RETURN_IF_ERROR(failed);
        updated.arrive_and_wait();
        failed = Lost();
      }
      EXPECT_FALSE(failed.ok());
      EXPECT_NE(model.values(), before);
      const std::vector<Joinable*> list = {ddp.get(), optimizer.get()};
      const absl::Status refused = Recover(list, *group[rank], Patient(-1, failed)).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      EXPECT_THAT(std::string(refused.message()),
                  HasSubstr("rank 0 has finished 1 steps, optimizer#0 had updated some parameters "
                            "in backward when the step failed"));
      EXPECT_THAT(std::string(refused.message()), HasSubstr("load a checkpoint"));
      ddp.reset();
      optimizer.reset();
      return absl::OkStatus();
    });
  }
}

TEST(RecoveryUsesTest, WithoutADataParallelTheFirstStepInTheNextGroupComparesTheValues) {
  Group group = *CreateTestGroup(2);
  std::latch stepped(2);
  OnEach(2, [&](int rank) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*group[rank], model.params(), kRule,
                                                          {.placement = WholeTensors{}}));
    const auto step = [&](int number) -> absl::Status {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(model.Backward(rank, number, [](int) { return absl::OkStatus(); }));
      return optimizer->Step();
    };
    EK_RETURN_IF_ERROR(step(0));
    stepped.arrive_and_wait();
    EK_ASSIGN_OR_RETURN(Recovered recovered,
                        Recover({optimizer.get()}, *group[rank], Patient(-1, Lost())));
    if (rank == 1) model.params()[2].value.as<float>()[0] += 1;
    EXPECT_THAT(std::string(step(1).message()),
                HasSubstr("before its first step the parameters are not equal on all ranks: "
                          "\"p2\""));
    optimizer.reset();
    return absl::OkStatus();
  });
}

TEST(RecoveryUsesTest, WhatCannotBeRecoveredIsRefused) {
  Group group = *CreateTestGroup(2);
  std::latch stepped(2);
  OnEach(2, [&](int rank) -> absl::Status {
    Replica<> mine;
    EK_RETURN_IF_ERROR(mine.Create(*group[rank], kRule));
    auto refusal = [&](const std::vector<Joinable*>& list) {
      return std::string(Recover(list, *group[rank], Patient()).status().message());
    };
    EXPECT_THAT(refusal({}), HasSubstr("at least one"));
    EXPECT_THAT(refusal({nullptr}), HasSubstr("entry 0 is null"));
    EXPECT_THAT(refusal({mine.ddp.get(), mine.ddp.get()}), HasSubstr("more than once"));
    EXPECT_THAT(refusal(mine.joinables()), HasSubstr("the group has not failed"));
    EK_RETURN_IF_ERROR(RunJoined(mine.joinables(), {}, [&](JoinScope&) -> absl::Status {
      EXPECT_THAT(refusal(mine.joinables()), HasSubstr("inside RunJoined()"));
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(mine.Steps(0, 1));
    // Other Joinables on each rank, once both have ended the step.
    stepped.arrive_and_wait();
    group[rank]->Abort(absl::CancelledError("enough"));
    std::vector<Joinable*> list = mine.joinables();
    if (rank == 1) list.pop_back();
    EXPECT_THAT(refusal(list),
                HasSubstr("rank 0 passes data_parallel#0, optimizer#0, rank 1 optimizer#0"));
    mine.Destroy();
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
