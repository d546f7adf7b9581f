#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

struct JoinedCase {
  Mode mode = Mode::kZeroAlone;
  UpdateRule rule;
  std::vector<std::vector<int>> epochs;  // Inputs per rank.
  bool freezes = false;
  bool by_initial = true;
  bool changes_settings = false;  // Learning rate, scale and skipped steps.
};

StepOptions OptionsOf(const JoinedCase& test, int step) {
  return {.grad_scale = test.changes_settings ? 0.5 : 1.0,
          .skip = test.changes_settings && step == 1};
}

absl::Status TrainJoined(Communicator& comm, const JoinedCase& test) {
  const int world_size = comm.world_size();
  const std::vector<int> frozen = test.freezes ? std::vector<int>{0, 2, 5} : std::vector<int>{};
  EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, test.mode, test.rule, kSizes, frozen));
  TestModel plain_model(kSizes);
  PlainTraining plain(&plain_model, test.rule);
  int begin = 0;  // The group's steps so far.
  for (const std::vector<int>& inputs : test.epochs) {
    EK_RETURN_IF_ERROR(RunJoined(
        trainer->joinables(),
        {.divide_by = test.by_initial ? DivideBy::kInitialWorldSize : DivideBy::kActiveRanks},
        [&](JoinScope&) -> absl::Status {
          for (int step = begin; step < begin + inputs[comm.rank()]; ++step) {
            if (test.freezes) Freeze(trainer->model.params(), step);
            if (test.changes_settings)
              EK_RETURN_IF_ERROR(trainer->zero->SetLearningRate(0.1 / (1 + step)));
            EK_RETURN_IF_ERROR(trainer->Step(step, OptionsOf(test, step)));
          }
          return absl::OkStatus();
        }));
    int step = begin;
    for (;; ++step) {
      const std::vector<int> active = ActiveIn(inputs, step - begin);
      if (active.empty()) break;
      if (test.freezes) Freeze(plain_model.params(), step);
      if (test.changes_settings)
        EK_RETURN_IF_ERROR(plain.groups().SetLearningRate(0.1 / (1 + step)));
      plain.Step(active, step,
                 1.0 / (test.by_initial ? world_size : static_cast<int>(active.size())),
                 OptionsOf(test, step));
    }
    begin = step;
    EXPECT_EQ(trainer->zero->groups().rules(), plain.groups().rules());
    EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
  }
  return absl::OkStatus();
}

void ExpectPlainTraining(const JoinedCase& test) {
  SCOPED_TRACE(absl::StrCat(ToString(test.mode), " ", ToString(test.rule), " ",
                            testing::PrintToString(test.epochs), test.freezes ? " freezing" : "",
                            test.by_initial ? "" : " by active ranks"));
  RunGroup(static_cast<int>(test.epochs[0].size()),
           [&](Communicator& comm) { return TrainJoined(comm, test); });
}

// Every pattern of 0 to `most` inputs on `world_size` ranks.
std::vector<std::vector<int>> Patterns(int world_size, int most) {
  std::vector<std::vector<int>> patterns = {{}};
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<std::vector<int>> longer;
    for (const std::vector<int>& pattern : patterns) {
      for (int inputs = 0; inputs <= most; ++inputs) {
        longer.push_back(pattern);
        longer.back().push_back(inputs);
      }
    }
    patterns = std::move(longer);
  }
  return patterns;
}

TEST(JoinedShardedOptimizerTest, IsThePlainTrainingForEveryPatternOnTwoRanks) {
  for (const std::vector<int>& inputs : Patterns(2, 3)) {
    for (Mode mode : kAllModes) {
      ExpectPlainTraining({.mode = mode, .rule = kMomentum, .epochs = {inputs, {2, 2}}});
      ExpectPlainTraining({.mode = mode, .rule = AdamW{}, .epochs = {inputs, {1, 2}}});
    }
  }
}

TEST(JoinedShardedOptimizerTest, IsThePlainTrainingForEveryPatternOnThreeRanks) {
  int turn = 0;
  for (const std::vector<int>& inputs : Patterns(3, 2)) {
    const UpdateRule rule = turn % 2 == 0 ? UpdateRule(AdamW{}) : UpdateRule(kMomentum);
    ExpectPlainTraining(
        {.mode = kAllModes[turn++ % 3], .rule = rule, .epochs = {inputs, {2, 2, 2}}});
  }
}

TEST(JoinedShardedOptimizerTest, IsThePlainTrainingOnFiveRanks) {
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{0, 1, 2, 3, 1}, {3, 0, 0, 0, 2}, {2, 2, 1, 2, 2}}) {
    for (Mode mode : kAllModes) {
      ExpectPlainTraining({.mode = mode, .rule = AdamW{}, .epochs = {inputs, {1, 1, 1, 1, 1}}});
    }
  }
}

TEST(JoinedShardedOptimizerTest, DividesByActiveRanksIfAsked) {
  for (Mode mode : kAllModes) {
    ExpectPlainTraining(
        {.mode = mode, .rule = kMomentum, .epochs = {{1, 3, 2}, {2, 1, 1}}, .by_initial = false});
  }
}

TEST(JoinedShardedOptimizerTest, DryRanksFollowLearningRateScaleAndSkippedSteps) {
  for (Mode mode : kAllModes) {
    ExpectPlainTraining(
        {.mode = mode, .rule = AdamW{}, .epochs = {{1, 4}, {3, 2}}, .changes_settings = true});
    ExpectPlainTraining({.mode = mode,
                         .rule = kMomentum,
                         .epochs = {{3, 0, 1}, {1, 1, 1}},
                         .changes_settings = true});
  }
}

// Also parameters that are trained for the first time, and get their owner, while ranks are
// exhausted.
TEST(JoinedShardedOptimizerTest, DryRanksFollowWhatIsFrozen) {
  for (Mode mode : kAllModes) {
    for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
      ExpectPlainTraining(
          {.mode = mode, .rule = rule, .epochs = {{1, 6}, {2, 2}}, .freezes = true});
      ExpectPlainTraining(
          {.mode = mode, .rule = rule, .epochs = {{4, 0, 2}, {2, 3, 1}}, .freezes = true});
      ExpectPlainTraining(
          {.mode = mode, .rule = rule, .epochs = {{0, 0, 0, 7, 1}}, .freezes = true});
    }
  }
}

TEST(JoinedShardedOptimizerTest, TakesWhatARankFrozeWhenItRanDryFromTheOthers) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_RETURN_IF_ERROR(RunJoined({trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (comm.rank() == 0 ? 1 : 3); ++step)
        EK_RETURN_IF_ERROR(trainer->Step(step));
      trainer->model.params().SetTrainable(
          "p1", comm.rank() != 0);  // For a next step, which the rank does not have.
      return absl::OkStatus();
    }));
    for (int step = 0; step < 3; ++step)
      plain.Step(step == 0 ? std::vector<int>{0, 1} : std::vector<int>{1}, step, 0.5);
    EXPECT_TRUE(trainer->model.params().trainable(1));
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

// Two backwards per step; rank 0 becomes exhausted in mid-step, and what it had goes into the next
// step of the others.
TEST(JoinedShardedOptimizerTest, TakesAlongWhatARankHadAccumulatedWhenItRanDry) {
  constexpr int kInputs[] = {3, 8, 6};
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel& model = trainer->model;
    EK_RETURN_IF_ERROR(RunJoined({trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int input = 0; input < kInputs[comm.rank()]; ++input) {
        model.Backward(comm.rank(), input, /*accumulate=*/true);
        if (input % 2 == 1) EK_RETURN_IF_ERROR(trainer->zero->Step());
      }
      return absl::OkStatus();
    }));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    for (int step = 0; step < 4; ++step) {
      std::vector<std::vector<float>> sums;
      std::vector<std::optional<TensorView>> gradients;
      for (int param = 0; param < model.size(); ++param) {
        std::vector<float>& sum =
            sums.emplace_back(kSizes[param], -0.0f);  // Changes nothing that is added to it.
        std::vector<float> own(kSizes[param]);
        for (int rank = 0; rank < 3; ++rank) {
          std::vector<float> of_rank(kSizes[param], -0.0f);
          for (int input = 2 * step; input < std::min(2 * step + 2, kInputs[rank]); ++input) {
            plain_model.ComputeGradient(rank, input, param, absl::MakeSpan(own));
            for (size_t k = 0; k < own.size(); ++k) of_rank[k] += own[k];
          }
          for (size_t k = 0; k < own.size(); ++k) sum[k] += of_rank[k];
        }
        for (float& element : sum) element *= static_cast<float>(1.0 / 3);
      }
      for (std::vector<float>& sum : sums) gradients.push_back(TensorView(absl::MakeSpan(sum)));
      plain.Update(gradients);
    }
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(JoinedShardedOptimizerTest, StandsBesideAnotherOneForOtherParameters) {
  const std::vector<int64_t> other_sizes = {50, 60};
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_ASSIGN_OR_RETURN(auto other,
                        Trainer::Create(comm, Mode::kZeroAlone, kMomentum, other_sizes));
    EK_RETURN_IF_ERROR(
        RunJoined({other->zero.get(), trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < 2 * comm.rank(); ++step) {
            EK_RETURN_IF_ERROR(trainer->Step(step));
            EK_RETURN_IF_ERROR(other->Step(step));
          }
          return absl::OkStatus();
        }));
    TestModel plain_model(kSizes), other_plain_model(other_sizes);
    PlainTraining plain(&plain_model, AdamW{}), other_plain(&other_plain_model, kMomentum);
    for (int step = 0; step < 4; ++step) {
      plain.Step(ActiveIn({0, 2, 4}, step), step, 1.0 / 3);
      other_plain.Step(ActiveIn({0, 2, 4}, step), step, 1.0 / 3);
    }
    EK_RETURN_IF_ERROR(ExpectEqual(*other, other_plain_model, other_plain));
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(JoinedShardedOptimizerTest, ConsolidatesInsideTheLoopRightAfterAStep) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    int step = 0;
    return RunJoined({trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
      EXPECT_TRUE(absl::IsFailedPrecondition(trainer->zero->Consolidate().status()));
      EXPECT_TRUE(absl::IsFailedPrecondition(trainer->zero->LoadState({})));
      for (; step < 2 * comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        plain.Step(step < 2 ? std::vector<int>{1, 2} : std::vector<int>{2}, step, 1.0 / 3);
        EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
        EK_ASSIGN_OR_RETURN(const OptimizerState last, trainer->zero->Consolidate(2));
        EXPECT_TRUE(IsSame(last, comm.rank() == 2 ? plain.state() : OptimizerState()));
      }
      return absl::OkStatus();
    });
  });
}

TEST(JoinedShardedOptimizerTest, SendsNothingExtraWhileAllRanksAreActive) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kDataParallelFirst, AdamW{}));
    EK_ASSIGN_OR_RETURN(const Channel* const channel, comm.OpenChannel(trainer->zero->join_name()));
    int64_t outside = 0;
    for (int run = 0; run < 2; ++run) {
      const int64_t before = channel->position();
      const auto train = [&] {
        absl::Status status;
        for (int step = 0; step < 3; ++step) status.Update(trainer->Step(step));
        return status;
      };
      if (run == 0) {
        EK_RETURN_IF_ERROR(train());
        outside = channel->position() - before;
      } else {
        EK_RETURN_IF_ERROR(
            RunJoined(trainer->joinables(), {}, [&](JoinScope&) { return train(); }));
        EXPECT_EQ(channel->position() - before, outside);
      }
    }
    return absl::OkStatus();
  });
}

TEST(JoinedShardedOptimizerTest, StopsAllRanksInTheSameStepIfAsked) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    const absl::Status status =
        RunJoined({trainer->zero.get()}, {.throw_on_early_termination = true},
                  [&](JoinScope&) -> absl::Status {
                    for (int step = 0; step < 2 + comm.rank(); ++step) {
                      EK_RETURN_IF_ERROR(trainer->Step(step));
                    }
                    return absl::OkStatus();
                  });
    EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
    for (int step = 0; step < 2; ++step) plain.Step(Ranks(3), step, 1.0 / 3);
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(JoinedShardedOptimizerTest, WorksWithoutAgreementWhereInputsAreEven) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroFirst, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_RETURN_IF_ERROR(
        RunJoined(trainer->joinables(), {.enable = false}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(trainer->Step(step));
          return absl::OkStatus();
        }));
    for (int step = 0; step < 3; ++step) plain.Step({0, 1}, step, 0.5);
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

}  // namespace
}  // namespace evenkeel::internal
