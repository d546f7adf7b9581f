// An optimizer by slices where ranks have different numbers of inputs: those that became exhausted
// update their slices too.

#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

struct Case {
  UpdateRule rule;
  std::vector<std::vector<int>> epochs;  // By rank: how many inputs.
  Slices optimizer;
  bool by_initial = true;
  bool changes_settings = false;
  bool freezes = false;
};

std::vector<int> ActiveIn(const std::vector<int>& inputs, int step) {
  std::vector<int> active;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    if (step < inputs[rank]) active.push_back(static_cast<int>(rank));
  }
  return active;
}

void Freeze(ParameterSet& params, int step) {
  for (int param = 0; param < params.size(); ++param)
    params.SetTrainable(param, (step + param) % 4 != 0);
}

absl::Status Train(Communicator& comm, const Case& test) {
  const bool in_step = test.optimizer.update_in_backward == kInStep;
  const auto options = [&](int step) {
    return test.changes_settings && in_step ? StepOptions{.grad_scale = 0.5, .skip = step == 1}
                                            : StepOptions();
  };
  EK_ASSIGN_OR_RETURN(auto rank,
                      SlicedRank::Create(comm, test.rule, {.placement = test.optimizer}));
  TestModel plain_model(kSizes);
  PlainTraining plain(&plain_model, test.rule);
  int begin = 0;  // The group's steps so far.
  for (const std::vector<int>& inputs : test.epochs) {
    EK_RETURN_IF_ERROR(RunJoined(
        rank->joinables(),
        {.divide_by = test.by_initial ? DivideBy::kInitialWorldSize : DivideBy::kActiveRanks},
        [&](JoinScope&) -> absl::Status {
          for (int step = begin; step < begin + inputs[comm.rank()]; ++step) {
            if (test.freezes) Freeze(rank->model.params(), step);
            if (test.changes_settings) {
              EK_RETURN_IF_ERROR(rank->optimizer->SetLearningRate(0.1 / (1 + step)));
            }
            EK_RETURN_IF_ERROR(rank->Step(step, options(step)));
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
                 1.0 / (test.by_initial ? comm.world_size() : static_cast<int>(active.size())),
                 options(step));
    }
    begin = step;
    EXPECT_EQ(rank->optimizer->steps_finished(), begin);
    EXPECT_EQ(rank->optimizer->groups().rules(), plain.groups().rules());
    EK_RETURN_IF_ERROR(ExpectEqual(*rank, plain_model, plain.state()));
  }
  return absl::OkStatus();
}

const Slices kAllOptions[] = {{}, {.overlap_forward = true}, {.update_in_backward = true}};

void ExpectPlainTraining(Case test) {
  for (const bool updates : {kInStep, kInBackward}) {
    for (bool overlaps : {false, true}) {
      test.optimizer = {.update_in_backward = updates, .overlap_forward = overlaps};
      SCOPED_TRACE(
          absl::StrCat(testing::PrintToString(test.epochs), test.freezes ? " freezing" : "",
                       updates == kInBackward ? " in backward" : "", overlaps ? " overlaps" : ""));
      RunGroup(static_cast<int>(test.epochs[0].size()),
               [&](Communicator& comm) { return Train(comm, test); });
    }
  }
}

TEST(JoinedSlicedOptimizerTest, IsThePlainTrainingForEveryPatternOnTwoRanks) {
  for (int a = 0; a <= 3; ++a) {
    for (int b = 0; b <= 3; ++b) {
      ExpectPlainTraining({.rule = kMomentum, .epochs = {{a, b}, {2, 2}}});
      ExpectPlainTraining({.rule = AdamW{}, .epochs = {{a, b}, {1, 2}}});
    }
  }
}

TEST(JoinedSlicedOptimizerTest, IsThePlainTrainingOnThreeAndFiveRanks) {
  ExpectPlainTraining({.rule = AdamW{}, .epochs = {{0, 3, 1}, {2, 2, 2}}});
  ExpectPlainTraining({.rule = kMomentum, .epochs = {{2, 0, 0}, {2, 1, 3}}});
  ExpectPlainTraining({.rule = AdamW{}, .epochs = {{0, 1, 2, 3, 1}, {1, 1, 1, 1, 1}}});
  ExpectPlainTraining({.rule = kMomentum, .epochs = {{3, 0, 0, 0, 2}, {0, 0, 0, 0, 1}}});
}

TEST(JoinedSlicedOptimizerTest, DividesByActiveRanksIfAsked) {
  ExpectPlainTraining({.rule = kMomentum, .epochs = {{1, 3, 2}, {2, 1, 1}}, .by_initial = false});
}

TEST(JoinedSlicedOptimizerTest, DryRanksFollowLearningRateScaleAndSkippedSteps) {
  ExpectPlainTraining({.rule = AdamW{}, .epochs = {{1, 4}, {3, 2}}, .changes_settings = true});
  ExpectPlainTraining(
      {.rule = kMomentum, .epochs = {{3, 0, 1}, {1, 1, 1}}, .changes_settings = true});
}

// Also what is trained for the first time while ranks are exhausted: its state is dealt out there,
// and moves as it must.
TEST(JoinedSlicedOptimizerTest, DryRanksFollowWhatIsFrozen) {
  ExpectPlainTraining({.rule = kMomentum, .epochs = {{1, 6}, {2, 2}}, .freezes = true});
  ExpectPlainTraining({.rule = AdamW{}, .epochs = {{4, 0, 2}, {2, 3, 1}}, .freezes = true});
  ExpectPlainTraining({.rule = AdamW{}, .epochs = {{0, 0, 0, 7, 1}}, .freezes = true});
}

TEST(JoinedSlicedOptimizerTest, WhatIsClearedAfterTheLastStepIsClearedOnAllRanks) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    const auto train = [&](auto& rank) -> absl::Status {
      EK_RETURN_IF_ERROR(RunJoined(rank.joinables(), {}, [&](JoinScope&) -> absl::Status {
        for (int step = 0; step <= comm.rank(); ++step) EK_RETURN_IF_ERROR(rank.Step(step));
        if (comm.rank() == 2) rank.model.params().SetGradState(1, GradState::kNone);
        return absl::OkStatus();
      }));
      EK_RETURN_IF_ERROR(rank.optimizer->Step());  // With the other gradients of the last step.
      return rank.optimizer->WaitForAll();
    };
    EK_ASSIGN_OR_RETURN(auto sliced, SlicedRank::Create(comm, kMomentum));
    EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(comm, kMomentum));
    EK_RETURN_IF_ERROR(train(*sliced));
    EK_RETURN_IF_ERROR(train(*whole));
    EXPECT_TRUE(internal::IsSame(sliced->model, whole->model)) << "rank " << comm.rank();
    return absl::OkStatus();
  });
}

TEST(JoinedSlicedOptimizerTest, ConsolidatesInsideTheLoopRightAfterAStep) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    return RunJoined(rank->joinables(), {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 1 + comm.rank(); ++step) {
        if (step == 0) {
          EXPECT_TRUE(absl::IsFailedPrecondition(rank->optimizer->Consolidate().status()));
        }
        EK_RETURN_IF_ERROR(rank->Step(step));
        EK_ASSIGN_OR_RETURN(const OptimizerState all, rank->optimizer->Consolidate());
        EXPECT_EQ(all.params.size(), kSizes.size());
        EXPECT_EQ(all.params.at(1).step, step + 1);
      }
      return absl::OkStatus();
    });
  });
}

// Two backwards per step; rank 0 becomes exhausted in mid-step, and what it had goes into the next
// step of the others.
TEST(JoinedSlicedOptimizerTest, TakesAlongWhatARankHadAccumulatedWhenItRanDry) {
  constexpr int kInputs[] = {3, 8, 6};
  const auto train = [&](auto& rank) {
    return RunJoined(rank.joinables(), {}, [&](JoinScope&) -> absl::Status {
      for (int input = 0; input < kInputs[rank.rank()]; ++input) {
        const bool reduces = input % 2 == 1;
        if (!reduces) rank.model.params().ClearGradients();
        EK_RETURN_IF_ERROR(rank.Backward(input, reduces ? StepMode::kSync : StepMode::kAccumulate));
        if (reduces) EK_RETURN_IF_ERROR(rank.optimizer->Step());
      }
      return absl::OkStatus();
    });
  };
  TestModel expected(kSizes);
  OptimizerState expected_state;
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(comm, AdamW{}));
    EK_RETURN_IF_ERROR(train(*whole));
    if (comm.rank() != 0) return absl::OkStatus();
    expected_state = whole->optimizer->state();
    for (int param = 0; param < expected.size(); ++param) {
      const TensorView from = whole->model.params()[param].value,
                       to = expected.params()[param].value;
      if (to.count > 0) std::memcpy(to.data, from.data, to.bytes());
    }
    return absl::OkStatus();
  });
  for (const Slices& options : kAllOptions) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto sliced, SlicedRank::Create(comm, AdamW{}, {.placement = options}));
      EK_RETURN_IF_ERROR(train(*sliced));
      return ExpectEqual(*sliced, expected, expected_state);
    });
  }
}

TEST(JoinedSlicedOptimizerTest, WorksWithoutAgreementWhereInputsAreEven) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_RETURN_IF_ERROR(
        RunJoined(rank->joinables(), {.enable = false}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank->Step(step));
          return absl::OkStatus();
        }));
    for (int step = 0; step < 3; ++step) plain.Step(Ranks(2), step, 0.5);
    return ExpectEqual(*rank, plain_model, plain.state());
  });
}

}  // namespace
}  // namespace evenkeel
