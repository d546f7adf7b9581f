#include <memory>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(ShardedOptimizerStateTest, ConsolidatesToOneRankOrToAll) {
  for (const UpdateRule& rule : {UpdateRule(Sgd{}), UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, rule));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, rule);
      EK_ASSIGN_OR_RETURN(const OptimizerState nothing, trainer->zero->Consolidate());
      EXPECT_TRUE(nothing == OptimizerState());
      for (int step = 0; step < 2; ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        plain.Step(Ranks(3), step, 1.0 / 3);
      }
      for (int to : {kAllRanks, 0, 1, 2}) {
        EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate(to));
        EXPECT_TRUE(
            IsSame(all, to == kAllRanks || to == comm.rank() ? plain.state() : OptimizerState()))
            << to;
      }
      EXPECT_TRUE(absl::IsInvalidArgument(trainer->zero->Consolidate(3).status()));
      return absl::OkStatus();
    });
  }
}

// Steps 0 and 1 with `world_before` ranks (0: unsharded), then the rest with `world_after` ranks,
// of which each has the same gradients, so that all of it equals one plain training.
TEST(ShardedOptimizerStateTest, GoesOnFromAStateOfAnyWorldSizeShardedOrNot) {
  for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
    for (int world_before : {0, 1, 2, 5}) {
      OptimizerState saved;
      TestModel at_save(kSizes);
      PlainTraining plain(&at_save, rule);
      for (int step = 0; step < 2; ++step) plain.Step({0}, step, 1.0);
      RunGroup(std::max(world_before, 1), [&](Communicator& comm) -> absl::Status {
        TestModel model(kSizes);
        std::unique_ptr<Optimizer> unsharded;
        std::unique_ptr<Optimizer> sharded;
        if (world_before == 0) {
          EK_ASSIGN_OR_RETURN(unsharded, Optimizer::Create(comm, model.params(), rule));
        } else {
          EK_ASSIGN_OR_RETURN(sharded, Optimizer::Create(comm, model.params(), rule,
                                                         {.placement = WholeTensors{}}));
        }
        for (int step = 0; step < 2; ++step) {
          model.Backward(0, step);
          for (int i = 0; i < model.size(); ++i)
            model.params().SetGradState(i, GradState::kReduced);
          EK_RETURN_IF_ERROR(unsharded != nullptr ? unsharded->Step() : sharded->Step());
        }
        EXPECT_TRUE(model.Bytes() == at_save.Bytes());
        OptimizerState state;
        if (unsharded != nullptr) {
          state = unsharded->state();
        } else {
          EK_ASSIGN_OR_RETURN(state, sharded->Consolidate(0));
        }
        if (comm.rank() == 0) saved = state;
        return absl::OkStatus();
      });
      EXPECT_TRUE(IsSame(saved, plain.state()));
      for (int world_after : {1, 3}) {
        SCOPED_TRACE(absl::StrCat("from ", world_before, " to ", world_after, ToString(rule)));
        RunGroup(world_after, [&](Communicator& comm) -> absl::Status {
          TestModel model(kSizes);
          PlainTraining again(&model, rule);
          for (int step = 0; step < 2; ++step) again.Step({0}, step, 1.0);
          EK_ASSIGN_OR_RETURN(auto zero, Optimizer::Create(comm, model.params(), rule,
                                                           {.placement = WholeTensors{}}));
          const OptimizerState before = saved;
          EK_RETURN_IF_ERROR(zero->LoadState(saved));
          EXPECT_TRUE(saved == before);
          TestModel plain_model(kSizes);
          PlainTraining whole(&plain_model, rule);
          for (int step = 0; step < 4; ++step) {
            if (step >= 2) {
              model.Backward(0, step);
              for (int i = 0; i < model.size(); ++i)
                model.params().SetGradState(i, GradState::kReduced);
              EK_RETURN_IF_ERROR(zero->Step());
            }
            whole.Step({0}, step, 1.0);
          }
          EXPECT_TRUE(IsSame(model, plain_model));
          EK_ASSIGN_OR_RETURN(const OptimizerState all, zero->Consolidate());
          EXPECT_TRUE(all == whole.state());
          return absl::OkStatus();
        });
      }
    }
  }
}

TEST(ShardedOptimizerStateTest, KeepsALoadedStateOfWhatIsFrozenNow) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, kMomentum);
    plain.Step({0, 1}, 0, 0.5);
    EK_ASSIGN_OR_RETURN(auto trainer,
                        Trainer::Create(comm, Mode::kZeroAlone, kMomentum, kSizes, {1, 4}));
    for (int i = 0; i < plain_model.size(); ++i) {
      const auto from = plain_model.params()[i].value.as<float>();
      std::ranges::copy(from, trainer->model.params()[i].value.as<float>().begin());
    }
    EXPECT_EQ(trainer->zero->owner(1), kNoOwner);
    EK_RETURN_IF_ERROR(trainer->zero->LoadState(plain.state()));
    EXPECT_NE(trainer->zero->owner(1), kNoOwner);
    for (int step = 1; step < 4; ++step) {
      for (TestModel* model : {&trainer->model, &plain_model}) {
        model->params().SetTrainable(1, step > 1);
        model->params().SetTrainable(4, step > 2);
      }
      EK_RETURN_IF_ERROR(trainer->Step(step));
      plain.Step({0, 1}, step, 0.5);
    }
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(ShardedOptimizerStateTest, RefusesAStateThatDoesNotFit) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel other({7, 300, 1, 0, 64, 34});
    PlainTraining plain(&other, AdamW{});
    plain.Step({0}, 0, 1.0);
    const absl::Status status = trainer->zero->LoadState(plain.state());
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(
        absl::StrContains(status.message(), "optimizer#0: optimizer state of parameter 5 \"p5\""))
        << status;
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel::internal
