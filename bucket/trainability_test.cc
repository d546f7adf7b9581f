#include "evenkeel/bucket/trainability.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8};

// A replica whose tensors carry their flags, as other libraries' do.
class Replica {
 public:
  explicit Replica(Communicator& comm, std::vector<uint8_t> flags = {1, 1, 1, 1})
      : comm_(comm), model_(kSizes), flags_(std::move(flags)) {}

  absl::Status Wrap(TrainabilityOptions trainability = {}, bool views = false) {
    trainability.reader = [this](int param) {
      ++reads_;
      return flags_[param] != 0;
    };
    trainability.warn = [this](absl::string_view text) { warnings_.emplace_back(text); };
    DataParallelOptions options{
        .reducer = {.caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = views},
        .trainability = std::move(trainability)};
    EK_ASSIGN_OR_RETURN(ddp_,
                        DataParallel::Create(&comm_, &model_.params(), {}, std::move(options)));
    ddp_->SetOptimizerState({});
    return absl::OkStatus();
  }

  // Backward follows the flags alone: it knows nothing of who was told of them.
  absl::Status Backward(int batch) {
    for (int p = static_cast<int>(kSizes.size()) - 1; p >= 0; --p) {
      if (flags_[p] == 0) continue;
      float* grad = static_cast<float*>(params()[p].grad.data);
      for (int j = 0; j < kSizes[p]; ++j) grad[j] = model_.GradientAt(p, j, comm_.rank(), batch);
      params().SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp_->GradientReady(p));
    }
    return absl::OkStatus();
  }
  absl::Status Step(int batch) {
    params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep());
    EK_RETURN_IF_ERROR(Backward(batch));
    return ddp_->FinishStep();
  }

  // The group's gradients of what is trained, and of nothing else.
  void ExpectGradientsOf(int batch) {
    for (int p = 0; p < static_cast<int>(kSizes.size()); ++p) {
      SCOPED_TRACE(absl::StrCat("rank ", comm_.rank(), ", p", p));
      ASSERT_EQ(params().grad_state(p), flags_[p] != 0 ? GradState::kReduced : GradState::kNone);
      const std::vector<float> gradient = model_.Gradient(p);
      for (int j = 0; flags_[p] != 0 && j < kSizes[p]; ++j) {
        double sum = 0;
        for (int rank = 0; rank < comm_.world_size(); ++rank)
          sum += model_.GradientAt(p, j, rank, batch);
        EXPECT_NEAR(gradient[j], sum / comm_.world_size(), 1e-5);
      }
    }
  }

  ParameterSet& params() { return model_.params(); }
  DataParallel& ddp() { return *ddp_; }
  ToyModel& model() { return model_; }
  std::vector<uint8_t>& flags() { return flags_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  int reads() const { return reads_; }

 private:
  Communicator& comm_;
  ToyModel model_;
  std::vector<uint8_t> flags_;
  std::vector<std::string> warnings_;
  int reads_ = 0;
  std::unique_ptr<DataParallel> ddp_;
};

class TrainabilityTest : public testing::TestWithParam<int> {
 protected:
  absl::Status Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    return RunTestRanks(GetParam(), body);
  }
  void RunWell(absl::FunctionRef<absl::Status(Communicator&)> body) {
    const absl::Status status = Run(body);
    EXPECT_TRUE(status.ok()) << status;
  }
  void RunAndExpect(const std::string& error, absl::FunctionRef<absl::Status(Communicator&)> body) {
    const absl::Status status = Run(body);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(error));
  }
};

TEST(TrainabilityWatchTest, AnOlderSetThatIsAdoptedHidesNoNewerOne) {
  ToyModel model(kSizes);
  TrainabilityWatch watch({.warn_on_change = false}, &model.params(), "watch");
  const TrainableMask older = model.params().mask();
  model.params().SetTrainable(2, false);
  watch.Adopt(older);  // A plan that does not know of the change.
  EXPECT_TRUE(*watch.BeforeStep(0));
  watch.Adopt(model.params().mask());
  EXPECT_FALSE(*watch.BeforeStep(1));
}

TEST_P(TrainabilityTest, AChangeBeforeAnotherPlanIsSeenByTheNextStep) {
  RunWell([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    ddp->SetOptimizerState({});
    model.params().SetTrainable(2, false);
    EK_RETURN_IF_ERROR(ddp->RebuildNow());
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    EK_RETURN_IF_ERROR(
        model.Backward(comm.rank(), 0, [&](int param) { return ddp->GradientReady(param); }));
    return ddp->FinishStep();
  });
}

TEST_P(TrainabilityTest, FreezingAndUnfreezingAfterWrappingAreSeenByTheNextStepOnEveryRank) {
  for (const bool views : {false, true}) {
    RunWell([&](Communicator& comm) -> absl::Status {
      Replica replica(comm, {0, 1, 1, 1});
      EK_RETURN_IF_ERROR(replica.Wrap({}, views));
      const std::vector<std::vector<uint8_t>> flags = {{0, 1, 1, 1}, {0, 1, 0, 1}, {1, 1, 0, 1},
                                                       {1, 1, 1, 1}, {0, 0, 0, 0}, {1, 0, 0, 0}};
      for (int step = 0; step < 12; ++step) {
        replica.flags() = flags[step / 2];
        EK_RETURN_IF_ERROR(replica.Step(step));
        replica.ExpectGradientsOf(step);
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(TrainabilityTest, UnfreezingAfterWrappingIsNeverSilentWhereNobodyLooks) {
  RunAndExpect("\"p0\" (0) has a new gradient, but it was frozen when the step began",
               [&](Communicator& comm) -> absl::Status {
                 Replica replica(comm, {0, 1, 1, 1});
                 EK_RETURN_IF_ERROR(replica.Wrap({.policy = TrainabilityPolicy::kNever}));
                 EK_RETURN_IF_ERROR(replica.Step(0));
                 replica.flags()[0] = 1;
                 return replica.Step(1);
               });
}

TEST_P(TrainabilityTest, FreezingAfterWrappingIsNeverSilentWhereNobodyLooks) {
  RunAndExpect("without a gradient of 1 trained parameter: \"p2\" (2)",
               [&](Communicator& comm) -> absl::Status {
                 Replica replica(comm);
                 EK_RETURN_IF_ERROR(replica.Wrap({.policy = TrainabilityPolicy::kNever}));
                 EK_RETURN_IF_ERROR(replica.Step(0));
                 replica.flags()[2] = 0;
                 return replica.Step(1);
               });
}

TEST_P(TrainabilityTest, SilencingTheWarningDoesNotMakeLaterStepsRefreshAgain) {
  for (const bool warns : {true, false}) {
    RunWell([&](Communicator& comm) -> absl::Status {
      Replica replica(comm);
      EK_RETURN_IF_ERROR(replica.Wrap(
          {.policy = TrainabilityPolicy::kEveryN, .every = 2, .warn_on_change = warns}));
      for (int step = 0; step < 2; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
      replica.flags()[1] = 0;
      for (int step = 2; step < 4; ++step)
        EK_RETURN_IF_ERROR(replica.Step(step));  // A new plan, a new order.
      const uint64_t generation = replica.ddp().reducer().generation();
      for (int step = 4; step < 8;
           ++step) {  // Half of them are not checked: a stale mask would be an error there.
        EK_RETURN_IF_ERROR(replica.Step(step));
        replica.ExpectGradientsOf(step);
      }
      EXPECT_EQ(replica.ddp().reducer().generation(), generation);
      if (warns) {
        EXPECT_THAT(replica.warnings(),
                    ElementsAre("data_parallel#0: the set of trained parameters has changed: 1 "
                                "frozen: \"p1\" (1)"));
      } else {
        EXPECT_THAT(replica.warnings(), ElementsAre());
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(TrainabilityTest, EveryNLooksInEveryNthStepOnly) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica replica(comm);
    EK_RETURN_IF_ERROR(replica.Wrap({.policy = TrainabilityPolicy::kEveryN, .every = 3}));
    const int before = replica.reads();
    for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
    EXPECT_EQ(replica.reads() - before, static_cast<int>(kSizes.size()));
    replica.flags()[0] = 0;
    for (int step = 3; step < 6; ++step) {
      EK_RETURN_IF_ERROR(replica.Step(step));
      replica.ExpectGradientsOf(step);
    }
    return absl::OkStatus();
  });
}

TEST_P(TrainabilityTest, AChangeOfTheSetThatThePolicyMustNotSeeIsAnErrorBeforeTheStep) {
  const std::pair<TrainabilityPolicy, std::string> policies[] = {
      {TrainabilityPolicy::kEveryN, "\"every_n\""}, {TrainabilityPolicy::kNever, "\"never\""}};
  for (const auto& [policy, name] : policies) {
    RunAndExpect(
        absl::StrCat("has changed (1 frozen: \"p0\" (0); 1 unfrozen: \"p3\" (3)), and the policy ",
                     name, " does not check it before step 2: call RefreshTrainable()"),
        [&, policy = policy](Communicator& comm) -> absl::Status {
          ToyModel model(kSizes);
          model.params().SetTrainable(3, false);
          DataParallelOptions options{.trainability = {.policy = policy, .every = 5}};
          EK_ASSIGN_OR_RETURN(auto ddp,
                              DataParallel::Create(&comm, &model.params(), {}, std::move(options)));
          EK_RETURN_IF_ERROR(ddp->BeginStep(StepMode::kAccumulate));
          EK_RETURN_IF_ERROR(ddp->FinishStep());
          model.params().SetTrainable(0, false);
          model.params().SetTrainable(3, true);
          return ddp->BeginStep();
        });
  }
}

TEST_P(TrainabilityTest, NeverStillVerifiesFromTimeToTime) {
  RunAndExpect(
      "the policy \"never\" does not check it before step 5",
      [&](Communicator& comm) -> absl::Status {
        Replica replica(comm);
        EK_RETURN_IF_ERROR(replica.Wrap({.policy = TrainabilityPolicy::kNever, .verify_every = 4}));
        replica.flags()[2] = 0;
        EK_RETURN_IF_ERROR(replica.ddp().RefreshTrainable());
        const int before = replica.reads();
        for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
        EXPECT_EQ(replica.reads() - before,
                  static_cast<int>(kSizes.size()));  // Before the first step.
        replica.flags()[2] = 1;
        // Its gradients do not come, so nothing else would notice.
        replica.params().ClearGradients();
        EK_RETURN_IF_ERROR(replica.ddp().BeginStep());
        for (int p : {3, 1, 0}) {
          EK_RETURN_IF_ERROR(replica.model().BackwardOf(
              p, comm.rank(), 3, [&](int i) { return replica.ddp().GradientReady(i); }));
        }
        EK_RETURN_IF_ERROR(replica.ddp().FinishStep());
        return replica.Step(4);
      });
}

TEST_P(TrainabilityTest, OnNotificationLooksWhenToldAndVerifiesFromTimeToTime) {
  RunAndExpect("call RefreshTrainable() after each change, on all ranks, or TrainableChanged()",
               [&](Communicator& comm) -> absl::Status {
                 Replica replica(comm);
                 EK_RETURN_IF_ERROR(replica.Wrap(
                     {.policy = TrainabilityPolicy::kOnNotification, .verify_every = 100}));
                 EK_RETURN_IF_ERROR(replica.Step(0));
                 const int before = replica.reads();
                 EK_RETURN_IF_ERROR(replica.Step(1));
                 EXPECT_EQ(replica.reads(), before);
                 replica.flags()[1] = 0;
                 replica.ddp().TrainableChanged();
                 for (int step = 2; step < 99; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
                 replica.ExpectGradientsOf(98);
                 EXPECT_EQ(replica.reads() - before, static_cast<int>(kSizes.size()));
                 EK_RETURN_IF_ERROR(replica.ddp().BeginStep(StepMode::kAccumulate));
                 EK_RETURN_IF_ERROR(replica.ddp().FinishStep());
                 replica.flags()[0] = 0;
                 return replica.ddp().BeginStep();
               });
}

TEST_P(TrainabilityTest, ACheckThatWasWastedIsSaidOnceWithTheIntegratorsNote) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica replica(comm);
    EK_RETURN_IF_ERROR(
        replica.Wrap({.wasted_after = 3, .wasted_note = "pass --static_layers to my_trainer"}));
    for (int step = 0; step < 8; ++step) EK_RETURN_IF_ERROR(replica.Step(step));
    EXPECT_THAT(
        replica.warnings(),
        ElementsAre("data_parallel#0: the set of trained parameters was read from 4 parameters in "
                    "3 steps, and never changed: TrainabilityPolicy::kOnNotification or kNever "
                    "saves that; pass --static_layers to my_trainer"));
    return absl::OkStatus();
  });
}

TEST_P(TrainabilityTest, ARefreshThatWouldLoseAnAccumulatedGradientIsRefusedUntilItIsReduced) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica replica(comm);
    EK_RETURN_IF_ERROR(replica.Wrap());
    EK_RETURN_IF_ERROR(replica.ddp().BeginStep(StepMode::kAccumulate));
    EK_RETURN_IF_ERROR(replica.Backward(0));
    EK_RETURN_IF_ERROR(replica.ddp().FinishStep());
    replica.flags()[3] = 0;
    const absl::Status refused = replica.ddp().RefreshTrainable();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("\"p3\" (3) was frozen while it holds a gradient"));
    replica.flags()[3] = 1;
    EK_RETURN_IF_ERROR(replica.Step(1));
    replica.ExpectGradientsOf(1);
    replica.params().ClearGradients();
    replica.flags()[3] = 0;
    EK_RETURN_IF_ERROR(replica.Step(2));
    replica.ExpectGradientsOf(2);
    return absl::OkStatus();
  });
}

TEST_P(TrainabilityTest, TheFlagsOfARankThatRanDryFollow) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica replica(comm);
    EK_RETURN_IF_ERROR(replica.Wrap(
        {.writer = [&](int param, bool trained) { replica.flags()[param] = trained ? 1 : 0; }}));
    const bool is_last = comm.rank() == comm.world_size() - 1;
    EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (is_last ? 6 : 2); ++step) {
        if (step == 3) replica.flags() = {1, 0, 1, 0};
        EK_RETURN_IF_ERROR(replica.Step(step));
      }
      if (is_last) replica.flags() = {1, 0, 0, 1};  // After its last step.
      if (is_last) replica.params().SetGradState(2, GradState::kNone);
      return absl::OkStatus();
    }));
    EXPECT_THAT(replica.flags(), ElementsAre(1, 0, 0, 1)) << "rank " << comm.rank();
    for (int p = 0; p < 4; ++p)  // Those of the last step; one was cleared after it.
      EXPECT_EQ(replica.params().grad_state(p), p == 0 ? GradState::kReduced : GradState::kNone)
          << "p" << p << ", rank " << comm.rank();
    EXPECT_NEAR(replica.model().Gradient(0)[1],
                replica.model().GradientAt(0, 1, comm.world_size() - 1, 5) / comm.world_size(),
                1e-5);
    EK_RETURN_IF_ERROR(replica.Step(9));
    replica.ExpectGradientsOf(9);
    return absl::OkStatus();
  });
}

TEST_P(TrainabilityTest, TheParameterSetOfARankThatRanDryFollows) {
  RunWell([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    const bool is_last = comm.rank() == comm.world_size() - 1;
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (is_last ? 3 : 1); ++step) {
        EK_RETURN_IF_ERROR(ddp->BeginStep(StepMode::kAccumulate));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
      }
      if (is_last) model.params().SetTrainable(2, false);
      return absl::OkStatus();
    }));
    for (int param = 0; param < model.params().size(); ++param)
      EXPECT_EQ(model.params().trainable(param), param != 2) << "rank " << comm.rank();
    return absl::OkStatus();
  });
}

TEST_P(TrainabilityTest, AStepThatAnotherOneHasBegunTakesTheFlagsOfNow) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica first(comm), second(comm);
    EK_RETURN_IF_ERROR(first.Wrap());
    EK_RETURN_IF_ERROR(second.Wrap());
    for (int step = 0; step < 4; ++step) {
      first.params().ClearGradients();
      EK_RETURN_IF_ERROR(first.ddp().BeginStep());
      second.flags()[1] = step % 2;
      EK_RETURN_IF_ERROR(second.Step(step));
      second.ExpectGradientsOf(step);
      EK_RETURN_IF_ERROR(first.Backward(step));
      EK_RETURN_IF_ERROR(first.ddp().FinishStep());
      first.ExpectGradientsOf(step);
    }
    return absl::OkStatus();
  });
}

// Its steps were the same on all ranks, those of the other one were not.
TEST_P(TrainabilityTest, FlagsFollowThoughOnlyAnotherOneWasShadowed) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica first(comm), second(comm);
    const auto writer = [](Replica& replica) {
      return [&](int param, bool trained) { replica.flags()[param] = trained ? 1 : 0; };
    };
    EK_RETURN_IF_ERROR(first.Wrap({.writer = writer(first)}));
    EK_RETURN_IF_ERROR(second.Wrap({.writer = writer(second)}));
    const bool is_last = comm.rank() == comm.world_size() - 1;
    EK_RETURN_IF_ERROR(
        RunJoined({&first.ddp(), &second.ddp()}, {}, [&](JoinScope&) -> absl::Status {
          EK_RETURN_IF_ERROR(second.Step(0));
          for (int step = 0; step < (is_last ? 3 : 1); ++step) EK_RETURN_IF_ERROR(first.Step(step));
          if (is_last) second.flags() = {1, 0, 0, 1};
          return absl::OkStatus();
        }));
    EXPECT_THAT(second.flags(), ElementsAre(1, 0, 0, 1)) << "rank " << comm.rank();
    EK_RETURN_IF_ERROR(second.Step(9));
    second.ExpectGradientsOf(9);
    return absl::OkStatus();
  });
}

TEST_P(TrainabilityTest, EvaluationBetweenStepsIsEachRanksOwn) {
  RunWell([&](Communicator& comm) -> absl::Status {
    Replica replica(comm);
    EK_RETURN_IF_ERROR(replica.Wrap());
    for (int step = 0; step < 4; ++step) {
      EK_RETURN_IF_ERROR(replica.Step(step));
      const int64_t records = StepControl::Of(comm).records_sent();
      for (int batch = 0; batch < 7 * comm.rank(); ++batch)
        replica.model().Forward(comm.rank(), batch);
      const absl::Status outside = replica.ddp().GradientReady(0);
      EXPECT_EQ(outside.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(outside.message()), HasSubstr("outside of a step"));
      EXPECT_EQ(StepControl::Of(comm).records_sent(), records);
    }
    return absl::OkStatus();
  });
}

TEST(TrainabilityOfTwoTest, AFlagThatOneRankChangesInAStepThatAnotherOneHasBegunIsNamed) {
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) -> absl::Status {
    Replica first(comm), second(comm);
    EK_RETURN_IF_ERROR(first.Wrap());
    EK_RETURN_IF_ERROR(second.Wrap());
    EK_RETURN_IF_ERROR(first.ddp().BeginStep());
    if (comm.rank() == 1) second.flags()[1] = 0;
    return second.Step(0);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 waits in step 2, which it began because the trained parameters of "
                        "data_parallel#1 have changed (frozen: p1), until all ranks"));
}

INSTANTIATE_TEST_SUITE_P(Worlds, TrainabilityTest, testing::Values(1, 2, 3, 5, 8));

TEST(TrainabilityOptionsTest, IntervalsThatAreNoneAreRefused) {
  EXPECT_TRUE(TrainabilityWatch::Check({}).ok());
  const std::pair<TrainabilityOptions, std::string> cases[] = {
      {{.every = 0}, "trainability.every is 0"},
      {{.verify_every = -1}, "verify_every is -1"},
      {{.wasted_after = -7}, "wasted_after is -7"}};
  for (const auto& [options, message] : cases) {
    const absl::Status status = TrainabilityWatch::Check(options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace evenkeel
