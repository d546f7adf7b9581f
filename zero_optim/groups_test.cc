// Parameter groups in both optimizers: rules of their own, schedules, groups that come later, and
// several optimizers that share a parameter set.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/local/local.h"
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

// Three kinds of rules, with two, one and no state tensors. Parameter 3, which is empty, is in
// none.
std::vector<ParameterGroup> ThreeKinds() {
  return {{.name = "adam", .params = {0, 4}, .rule = AdamW{.weight_decay = 0.1}},
          {.name = "momentum", .params = {5, 1}, .rule = kMomentum},
          {.name = "sgd", .params = {2}, .rule = Sgd{.learning_rate = 0.3}}};
}

TEST(GroupsTest, EachUpdatesByItsOwnRuleAtAnyWorldSize) {
  for (int world_size : TestedWorldSizes()) {
    for (Mode mode : kAllModes) {
      SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(mode)));
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, ThreeKinds()));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, ThreeKinds());
        for (int step = 0; step < 4; ++step) {
          EK_RETURN_IF_ERROR(trainer->Step(step));
          plain.Step(Ranks(world_size), step, 1.0 / world_size);
        }
        EXPECT_EQ(trainer->zero->owner(3), kNoOwner);
        EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));

        // To one rank, and back into another optimizer.
        EK_ASSIGN_OR_RETURN(const OptimizerState last, trainer->zero->Consolidate(world_size - 1));
        EXPECT_TRUE(IsSame(last, comm.rank() == world_size - 1 ? plain.state() : OptimizerState()));
        EK_ASSIGN_OR_RETURN(auto again, Trainer::Create(comm, mode, ThreeKinds()));
        EK_RETURN_IF_ERROR(again->zero->LoadState(plain.state()));
        EK_ASSIGN_OR_RETURN(const OptimizerState loaded, again->zero->Consolidate());
        EXPECT_TRUE(IsSame(loaded, plain.state()));
        return absl::OkStatus();
      });
    }
  }
}

TEST(GroupsTest, TheUnshardedOptimizerHasThemToo) {
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes), plain_model(kSizes);
    PlainTraining plain(&plain_model, ThreeKinds());
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), ThreeKinds()));
    for (int step = 0; step < 4; ++step) {
      EK_RETURN_IF_ERROR(optimizer->SetLearningRate("adam", 0.1 / (1 + step)));
      EK_RETURN_IF_ERROR(plain.groups().SetLearningRate("adam", 0.1 / (1 + step)));
      model.Backward(0, step);
      EK_RETURN_IF_ERROR(optimizer->Step());
      plain.Step({0}, step, 1.0);
    }
    EXPECT_TRUE(IsSame(model, plain_model));
    EXPECT_TRUE(IsSame(optimizer->state(), plain.state()));
    EXPECT_TRUE(absl::IsInvalidArgument(optimizer->SetLearningRate("nobody", 1)));
    return absl::OkStatus();
  });
}

// Exhausted ranks get each group's settings with the steps, and those that were set after the last
// one at the end.
TEST(GroupsTest, SchedulesOfEachGroupUnderUnevenInputsAreThoseOfOneRank) {
  const std::vector<std::vector<int>> inputs = {{2, 5},    {4, 0},          {1, 4, 2},
                                                {0, 3, 3}, {1, 2, 3, 4, 5}, {5, 0, 0, 1, 0}};
  for (const std::vector<int>& of_rank : inputs) {
    for (Mode mode : kAllModes) {
      SCOPED_TRACE(absl::StrCat(testing::PrintToString(of_rank), " ", ToString(mode)));
      const int world_size = static_cast<int>(of_rank.size());
      const auto schedule = [](auto& groups, int step) -> absl::Status {
        EK_RETURN_IF_ERROR(groups.SetLearningRate(0.05 / (1 + step)));
        return groups.SetLearningRate("momentum", 0.3 / (1 + 2 * step));
      };
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, ThreeKinds()));
        EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < of_rank[comm.rank()]; ++step) {
            EK_RETURN_IF_ERROR(schedule(*trainer->zero, step));
            EK_RETURN_IF_ERROR(trainer->Step(step));
            EK_RETURN_IF_ERROR(schedule(*trainer->zero, step + 1));
          }
          return absl::OkStatus();
        }));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, ThreeKinds());
        for (int step = 0;; ++step) {
          const std::vector<int> active = ActiveIn(of_rank, step);
          if (active.empty()) break;
          EK_RETURN_IF_ERROR(schedule(plain.groups(), step));
          plain.Step(active, step, 1.0 / world_size);
          EK_RETURN_IF_ERROR(schedule(plain.groups(), step + 1));
        }
        EXPECT_EQ(trainer->zero->groups().rules(), plain.groups().rules())
            << "rank " << comm.rank();
        return ExpectEqual(*trainer, plain_model, plain);
      });
    }
  }
}

TEST(GroupsTest, RanksThatDifferAreToldRankGroupAndSetting) {
  const struct {
    std::vector<ParameterGroup> groups;
    const char* says;
  } cases[] = {
      {{{.name = "a", .params = {0}},
        {.name = "b", .params = {1}, .rule = Sgd{.weight_decay = 0.5}}},
       "group \"b\": rank 1 has weight_decay=0.5; ranks 0,2 have weight_decay=0"},
      {{{.name = "a", .params = {0}}, {.name = "b", .params = {1}, .rule = Adam{}}},
       "group \"b\": rank 1 has Adam; ranks 0,2 have SGD"},
      {{{.name = "a", .params = {0}}, {.name = "c", .params = {1}}},
       "the name of group 1: rank 1 has \"c\"; ranks 0,2 have \"b\""},
      {{{.name = "a", .params = {0, 1}}}, "the number of groups: rank 1 has 1; ranks 0,2 have 2"},
      {{{.name = "a", .params = {0, 1}}, {.name = "b"}},
       "the group of \"p1\": rank 1 has \"a\"; ranks 0,2 have \"b\""},
      {{{.name = "a", .params = {0}}, {.name = "b"}},
       "the group of \"p1\": rank 1 has none; ranks 0,2 have \"b\""},
      {{{.name = "a", .params = {0}}, {.name = "b", .params = {0}}},
       "rank 1: group \"b\": parameter 0 is in group \"a\", too"},
  };
  const std::vector<ParameterGroup> right = {{.name = "a", .params = {0}},
                                             {.name = "b", .params = {1}}};
  for (const auto& wrong : cases) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      TestModel model(kSizes);
      const auto& groups = comm.rank() == 1 ? wrong.groups : right;
      for (const absl::Status& status :
           {Optimizer::Create(comm, model.params(), groups).status(),
            Optimizer::Create(comm, model.params(), groups, {.placement = WholeTensors{}})
                .status()}) {
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
        EXPECT_TRUE(absl::StrContains(status.message(), wrong.says)) << status;
      }
      return absl::OkStatus();
    });
  }
}

TEST(GroupsTest, AnOptimizerWithoutParametersIsRefused) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    ParameterSet none;
    EXPECT_TRUE(absl::IsInvalidArgument(Optimizer::Create(comm, none, AdamW{}).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        Optimizer::Create(comm, none, AdamW{}, {.placement = WholeTensors{}}).status()));
    TestModel model(kSizes);
    EXPECT_TRUE(absl::IsInvalidArgument(Optimizer::Create(comm, model.params(),
                                                          std::vector<ParameterGroup>(),
                                                          {.placement = WholeTensors{}})
                                            .status()));
    return absl::OkStatus();
  });
}

// A parameter in no group may have a type that optimizers can't update.
TEST(GroupsTest, LeaveAloneWhatIsInNone) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    std::vector<BFloat16> half(3);
    std::vector<float> value(3, 1.0f), gradient(3, 1.0f);
    ParameterSet params;
    params.Add("half", absl::MakeSpan(half));
    params.Add("w", absl::MakeSpan(value), absl::MakeSpan(gradient));
    EK_ASSIGN_OR_RETURN(
        auto optimizer,
        Optimizer::Create(comm, params, {{.name = "w", .params = {1}, .rule = Sgd{}}},
                          {.placement = WholeTensors{}}));
    params.SetGradState(0, GradState::kLocal);
    params.SetGradState(1, GradState::kLocal);
    EK_RETURN_IF_ERROR(optimizer->Step());
    EXPECT_EQ(params.grad_state(0), GradState::kLocal);
    EXPECT_EQ(value[0], 1 - 0.01f);
    return absl::OkStatus();
  });
}

// A group that comes later: all of it trained, or some; behind a frozen giant, or not.
TEST(AddGroupTest, GivesOwnersToTheNewParametersOnlyAndTrainsThem) {
  const std::vector<int64_t> sizes = {9, 7, 5, 3, 100000, 6, 4};
  for (int world_size : {1, 2, 3, 5}) {
    for (bool some_frozen : {false, true}) {
      SCOPED_TRACE(absl::StrCat("world ", world_size, some_frozen ? ", some frozen" : ""));
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        const std::vector<ParameterGroup> first = {
            {.name = "first", .params = {0, 1, 2, 3}, .rule = AdamW{}}};
        const ParameterGroup second = {.name = "second", .params = {4, 5, 6}, .rule = kMomentum};
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, first, sizes));
        TestModel plain_model(sizes);
        PlainTraining plain(&plain_model, first);
        std::vector<int> owners;
        for (int step = 0; step < 6; ++step) {
          if (step == 2) {
            for (int param = 0; param < 4; ++param) owners.push_back(trainer->zero->owner(param));
            trainer->model.params().SetTrainable(4, !some_frozen);
            plain_model.params().SetTrainable(4, !some_frozen);
            EK_RETURN_IF_ERROR(trainer->zero->AddGroup(second));
            EK_RETURN_IF_ERROR(plain.groups().Add(second));
          }
          EK_RETURN_IF_ERROR(trainer->Step(step));
          plain.Step(Ranks(world_size), step, 1.0 / world_size);
        }
        for (int param = 0; param < 4; ++param)
          EXPECT_EQ(trainer->zero->owner(param), owners[param]);
        EXPECT_EQ(trainer->zero->owner(4) == kNoOwner, some_frozen);
        EXPECT_NE(trainer->zero->owner(5), kNoOwner);
        return ExpectEqual(*trainer, plain_model, plain);
      });
    }
  }
}

TEST(AddGroupTest, SpreadsAsThePartitionSays) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer,
                        Trainer::Create(comm, Mode::kZeroAlone, {{.name = "a", .params = {0, 1}}},
                                        std::vector<int64_t>{9, 7, 5, 3}));
    EK_RETURN_IF_ERROR(trainer->zero->AddGroup({.name = "b", .params = {2, 3}}));
    std::vector<int> owners;
    for (int i = 0; i < 4; ++i) owners.push_back(trainer->zero->owner(i));
    EXPECT_THAT(owners, ElementsAre(0, 1, 1, 0));  // 9 and 3 against 7 and 5.
    return absl::OkStatus();
  });
}

TEST(AddGroupTest, IsRefusedOnAllRanksIfOneHasAnotherAndInsideALoop) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto sharded,
                        Optimizer::Create(comm, model.params(), {{.name = "a", .params = {0, 1}}},
                                          {.placement = WholeTensors{}}));
    EK_ASSIGN_OR_RETURN(auto plain,
                        Optimizer::Create(comm, model.params(), {{.name = "a", .params = {0, 1}}}));
    const ParameterGroup other = {.name = "b", .params = {2 + comm.rank()}};
    const ParameterGroup broken = {.name = "b", .params = {1 + comm.rank()}};
    for (const absl::Status& status : {sharded->AddGroup(other), plain->AddGroup(other)}) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(),
                                    "the group of \"p2\": rank 0 has \"b\"; rank 1 has none"))
          << status;
    }
    for (const absl::Status& status : {sharded->AddGroup(broken), plain->AddGroup(broken)}) {
      EXPECT_TRUE(
          absl::StrContains(status.message(), "rank 0: group \"b\": parameter 1 is in group \"a\""))
          << status;
    }
    EXPECT_EQ(sharded->groups().size(), 1);
    EK_RETURN_IF_ERROR(RunJoined({sharded.get(), plain.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (const absl::Status& status : {sharded->AddGroup(other), plain->AddGroup(other)}) {
        EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      }
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(sharded->AddGroup({.name = "b", .params = {2}}));
    EK_RETURN_IF_ERROR(plain->AddGroup({.name = "b", .params = {2}}));
    EXPECT_TRUE(plain->groups().contains(2));
    return absl::OkStatus();
  });
}

// One model, one data parallel; a sharded optimizer for some parameters, and another sharded or
// unsharded one for the rest.
TEST(SeveralOptimizersTest, ShareAParameterSetAndADataParallelUnderUnevenInputs) {
  const std::vector<ParameterGroup> firsts = {
      {.name = "first", .params = {0, 1, 4}, .rule = AdamW{}}};
  const std::vector<ParameterGroup> seconds = {
      {.name = "second", .params = {2, 3, 5}, .rule = kMomentum}};
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{3, 3}, {1, 4}, {4, 0, 2}, {1, 3, 0, 2, 2}}) {
    for (bool both_sharded : {true, false}) {
      SCOPED_TRACE(
          absl::StrCat(testing::PrintToString(inputs), both_sharded ? " both sharded" : ""));
      const int world_size = static_cast<int>(inputs.size());
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kDataParallelFirst, firsts));
        ParameterSet& params = trainer->model.params();
        std::unique_ptr<Optimizer> sharded;
        std::unique_ptr<Optimizer> whole;
        std::vector<Joinable*> joinables = trainer->joinables();
        if (both_sharded) {
          EK_ASSIGN_OR_RETURN(
              sharded, Optimizer::Create(comm, params, seconds, {.placement = WholeTensors{}}));
          joinables.push_back(sharded.get());
        } else {
          EK_ASSIGN_OR_RETURN(whole, Optimizer::Create(comm, params, seconds));
          joinables.push_back(whole.get());
        }
        EK_RETURN_IF_ERROR(RunJoined(joinables, {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < inputs[comm.rank()]; ++step) {
            Freeze(params, step);
            EK_RETURN_IF_ERROR(trainer->Step(step));
            EK_RETURN_IF_ERROR(both_sharded ? sharded->Step() : whole->Step());
          }
          return absl::OkStatus();
        }));
        TestModel plain_model(kSizes);
        std::vector<ParameterGroup> all = firsts;
        all.push_back(seconds[0]);
        PlainTraining plain(&plain_model, all);
        for (int step = 0;; ++step) {
          const std::vector<int> active = ActiveIn(inputs, step);
          if (active.empty()) break;
          Freeze(plain_model.params(), step);
          plain.Step(active, step, 1.0 / world_size);
        }
        EXPECT_TRUE(IsSame(trainer->model, plain_model)) << "rank " << comm.rank();
        EK_ASSIGN_OR_RETURN(OptimizerState state, trainer->zero->Consolidate());
        OptimizerState rest;
        if (both_sharded) {
          EK_ASSIGN_OR_RETURN(rest, sharded->Consolidate());
        } else {
          rest = whole->state();
        }
        state.params.merge(rest.params);
        EXPECT_TRUE(IsSame(state, plain.state())) << "rank " << comm.rank();
        return absl::OkStatus();
      });
    }
  }
}

}  // namespace
}  // namespace evenkeel::internal
