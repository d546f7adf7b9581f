// State that moves to other owners: when what is trained changes, and when it is asked for.

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;

constexpr double kNever = std::numeric_limits<double>::infinity();
const std::vector<int64_t> kEven = {100, 100, 100, 100, 100, 100, 30, 30};

absl::StatusOr<std::unique_ptr<Trainer>> Make(Communicator& comm, Mode mode,
                                              std::vector<int64_t> sizes, double max_imbalance,
                                              const std::vector<int>& frozen = {}) {
  auto trainer = std::make_unique<Trainer>(std::move(sizes), DType::kFloat32);
  for (int param : frozen) trainer->model.params().SetTrainable(param, false);
  trainer->options.max_imbalance = max_imbalance;
  EK_RETURN_IF_ERROR(trainer->Init(comm, mode, AllInOneGroup(trainer->model.params(), AdamW{})));
  return trainer;
}

std::vector<int> OwnersOf(const Trainer& trainer) {
  std::vector<int> owners;
  for (int i = 0; i < trainer.model.size(); ++i) owners.push_back(trainer.zero->owner(i));
  return owners;
}

// Everything that the lower half of the ranks own is frozen from step 2 on, and trained again from
// step 5 on.
void FreezeHalf(ParameterSet& params, const std::vector<int>& first_owners, int world_size,
                int step) {
  for (int param = 0; param < params.size(); ++param) {
    const bool is_of_lower_half = first_owners[param] < (world_size + 1) / 2;
    params.SetTrainable(param, !is_of_lower_half || step < 2 || step >= 5);
  }
}

TEST(RebalanceTest, StateMovesWhenWhatIsTrainedChangesAndTheResultIsThatOfOneRank) {
  for (const std::vector<int>& inputs : std::vector<std::vector<int>>{
           {8, 8}, {8, 8, 8}, {3, 8}, {8, 4, 1}, {0, 8, 6}, {8, 2, 3, 0, 6}}) {
    for (Mode mode : kAllModes) {
      SCOPED_TRACE(absl::StrCat(testing::PrintToString(inputs), " ", ToString(mode)));
      const int world_size = static_cast<int>(inputs.size());
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Make(comm, mode, kEven, 1.5));
        TestModel plain_model(kEven);
        PlainTraining plain(&plain_model, AdamW{});
        const std::vector<int> first = OwnersOf(*trainer);
        EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < inputs[comm.rank()]; ++step) {
            FreezeHalf(trainer->model.params(), first, world_size, step);
            EK_RETURN_IF_ERROR(trainer->Step(step));
            if (world_size > 3) continue;  // With so few parameters per rank nothing can be gained.
            EXPECT_LE(trainer->zero->imbalance(), 1.5) << "step " << step;
            EXPECT_TRUE(step != 2 || OwnersOf(*trainer) != first);
          }
          return absl::OkStatus();
        }));
        for (int step = 0; step < 8; ++step) {
          FreezeHalf(plain_model.params(), first, world_size, step);
          plain.Step(ActiveIn(inputs, step), step, 1.0 / world_size);
        }
        // Each state is on its owner, and nowhere else.
        const OptimizerState own = trainer->zero->state();
        for (int param = 0; param < trainer->model.size(); ++param) {
          EXPECT_EQ(own.params.contains(param), trainer->zero->owner(param) == comm.rank());
        }
        return ExpectEqual(*trainer, plain_model, plain);
      });
    }
  }
}

TEST(RebalanceTest, MovesNothingBelowTheThresholdOrWhereNothingIsToBeGained) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto never, Make(comm, Mode::kZeroAlone, kEven, kNever));
    EK_ASSIGN_OR_RETURN(auto giant, Make(comm, Mode::kZeroAlone, {1000, 10, 10, 10}, 1.1));
    const std::vector<int> never_first = OwnersOf(*never), giant_first = OwnersOf(*giant);
    const Channel* const channel = comm.OpenChannel(giant->zero->join_name()).value();
    int64_t per_step = 0;
    for (int step = 0; step < 4; ++step) {
      FreezeHalf(never->model.params(), never_first, 3, step + 1);
      EK_RETURN_IF_ERROR(never->Step(step));
      const int64_t before = channel->position();
      EK_RETURN_IF_ERROR(giant->Step(step));
      if (step == 0) per_step = channel->position() - before;
      EXPECT_EQ(channel->position() - before, per_step);
    }
    EXPECT_GT(never->zero->imbalance(), 2.5);
    EXPECT_EQ(OwnersOf(*never), never_first);
    EXPECT_GT(giant->zero->imbalance(), 2.5);  // One parameter has nearly all, whoever owns it.
    EXPECT_EQ(OwnersOf(*giant), giant_first);
    return absl::OkStatus();
  });
}

TEST(RebalanceTest, ComesWhenAskedForAlsoInsideALoopWithRanksThatAreDry) {
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{5, 5}, {1, 5, 3}, {5, 0, 2}}) {
    const int world_size = static_cast<int>(inputs.size());
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Make(comm, Mode::kZeroAlone, kEven, kNever));
      TestModel plain_model(kEven);
      PlainTraining plain(&plain_model, AdamW{});
      const std::vector<int> first = OwnersOf(*trainer);
      EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) -> absl::Status {
        EXPECT_TRUE(absl::IsFailedPrecondition(trainer->zero->Rebalance()));
        for (int step = 0; step < inputs[comm.rank()]; ++step) {
          FreezeHalf(trainer->model.params(), first, world_size, step);
          EK_RETURN_IF_ERROR(trainer->Step(step));
          if (step == 3) {
            EXPECT_GT(trainer->zero->imbalance(), 1.9);
            EK_RETURN_IF_ERROR(trainer->zero->Rebalance());
            EXPECT_LT(trainer->zero->imbalance(), 1.6);
          }
        }
        return absl::OkStatus();
      }));
      for (int step = 0; step < 5; ++step) {
        FreezeHalf(plain_model.params(), first, world_size, step);
        plain.Step(ActiveIn(inputs, step), step, 1.0 / world_size);
      }
      EXPECT_LT(trainer->zero->imbalance(), 1.6) << "rank " << comm.rank();
      EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
      EK_RETURN_IF_ERROR(
          trainer->zero->Rebalance());  // Outside of the loop; nothing is left to do.
      return ExpectEqual(*trainer, plain_model, plain);
    });
  }
}

// It was trained once, has state and an owner; what is unfrozen then is dealt out as if it were not
// there.
TEST(FrozenGiantTest, DoesNotCountWhenOthersGetAnOwnerThoughItWasTrainedOnce) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer,
                        Make(comm, Mode::kZeroAlone, {10000, 9, 7, 5, 3}, kNever, {1, 2, 3, 4}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    trainer->model.params().SetTrainable("p", true);
    trainer->model.params().SetTrainable(0, false);
    EK_RETURN_IF_ERROR(trainer->Step(1));
    EXPECT_THAT(OwnersOf(*trainer), ElementsAre(0, 0, 1, 1, 0));  // 9 and 3 against 7 and 5.
    EXPECT_EQ(trainer->zero->imbalance(), 1.0);
    return absl::OkStatus();
  });
}

TEST(FrozenOwnerTest, NothingIsSentForARankAllOfWhoseParametersAreFrozen) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Make(comm, Mode::kDataParallelFirst, {90, 80, 70}, kNever));
    const Channel* const channel = comm.OpenChannel(trainer->zero->join_name()).value();
    for (int step = 0; step < 6; ++step) {
      for (int param = 0; param < 3; ++param)
        trainer->model.params().SetTrainable(param, param >= step / 2);
      const int64_t before = channel->position();
      EK_RETURN_IF_ERROR(trainer->Step(step));
      EXPECT_EQ(channel->position() - before, 3 - step / 2)
          << "step " << step;  // A broadcast per owner who has some.
    }
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel::internal
