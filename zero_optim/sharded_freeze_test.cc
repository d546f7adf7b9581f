#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;

TEST(ShardedOptimizerFreezeTest, WhatWasNeverTrainedOwnsNothingAndDoesNotCount) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer,
                        Trainer::Create(comm, Mode::kZeroAlone, AdamW{}, {10000, 8, 6, 4, 3}, {0}));
    std::vector<int> owners;
    for (int i = 0; i < 5; ++i) owners.push_back(trainer->zero->owner(i));
    EXPECT_THAT(owners, ElementsAre(kNoOwner, 0, 1, 1, 0));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
    EXPECT_FALSE(all.params.contains(0));
    return absl::OkStatus();
  });
}

TEST(ShardedOptimizerFreezeTest, EqualsTheUnshardedOneWhateverIsFrozen) {
  for (int world_size : {1, 2, 3, 5}) {
    for (Mode mode : kAllModes) {
      for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
        SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(mode)));
        RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, rule, kSizes, {0, 2, 5}));
          TestModel plain_model(kSizes);
          PlainTraining plain(&plain_model, rule);
          for (int step = 0; step < 7; ++step) {
            Freeze(trainer->model.params(), step);
            Freeze(plain_model.params(), step);
            EK_RETURN_IF_ERROR(trainer->Step(step));
            plain.Step(Ranks(world_size), step, 1.0 / world_size);
          }
          EXPECT_EQ(plain.state().params.at(0).step, 5);
          EXPECT_EQ(plain.state().params.at(1).step, 3);
          EXPECT_EQ(trainer->zero->owner(5), kNoOwner);
          return ExpectEqual(*trainer, plain_model, plain);
        });
      }
    }
  }
}

// Frozen parameters stay out of the broadcasts, even if one rank owns nothing else: its replicas
// may even differ.
TEST(ShardedOptimizerFreezeTest, NeverSendsWhatIsFrozen) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer,
                        Trainer::Create(comm, Mode::kZeroAlone, kMomentum, {100, 60, 30}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    trainer->model.params().SetTrainable(0, false);
    EXPECT_EQ(trainer->zero->owner(0), 0);
    trainer->model.params()[0].value.as<float>()[0] = static_cast<float>(comm.rank());
    const int64_t before = comm.OpenChannel(trainer->zero->join_name()).value()->position();
    EK_RETURN_IF_ERROR(trainer->Step(1));
    EXPECT_EQ(comm.OpenChannel(trainer->zero->join_name()).value()->position() - before, 1 + 1);
    EXPECT_EQ(trainer->model.params()[0].value.as<float>()[0], static_cast<float>(comm.rank()));
    return absl::OkStatus();
  });
}

TEST(ShardedOptimizerFreezeTest, FrozenAtOnceMeansFromTheNextStepOn) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kDataParallelFirst, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    for (int step = 0; step < 4; ++step) {
      EK_RETURN_IF_ERROR(trainer->ddp->BeginStep());
      trainer->model.params().ClearGradients();
      trainer->model.Backward(comm.rank(), step);
      EK_RETURN_IF_ERROR(trainer->Reduce());
      // In mid-step: no update from now on, and no broadcast from the next step on.
      trainer->model.params().SetTrainable(1, step != 1);
      plain_model.params().SetTrainable(1, step == 0 || step == 3);
      EK_RETURN_IF_ERROR(trainer->zero->Step());
      plain.Step({0, 1}, step, 0.5);
    }
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(ShardedOptimizerFreezeTest, RanksThatFreezeDifferentParametersGetAnErrorThatNamesThem) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    if (comm.rank() == 1) trainer->model.params().SetTrainable("p4", false);
    const absl::Status step = trainer->Step(1);
    EXPECT_TRUE(absl::IsFailedPrecondition(step)) << step;
    EXPECT_TRUE(absl::StrContains(step.message(), "frozen: p4")) << step;
    return step;
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

}  // namespace
}  // namespace evenkeel::internal
