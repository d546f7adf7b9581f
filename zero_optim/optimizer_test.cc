#include "evenkeel/zero_optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33};
const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

std::vector<UpdateRule> OneOfEach() {
  return {Sgd{.learning_rate = 0.1}, kMomentum,
          Sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true}, Adam{.weight_decay = 0.1},
          AdamW{}};
}

// `body` on a group of one.
void RunAlone(absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(1, body);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OptimizerTest, UpdatesEachParameterByTheRule) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const UpdateRule& rule : OneOfEach()) {
      SCOPED_TRACE(absl::StrCat(ToString(rule), " ", ToString(dtype)));
      RunAlone([&](Communicator& comm) -> absl::Status {
        TestModel model(kSizes, dtype), plain_model(kSizes, dtype);
        PlainTraining plain(&plain_model, rule);
        EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), rule));
        for (int step = 0; step < 4; ++step) {
          model.Backward(0, step);
          EK_RETURN_IF_ERROR(optimizer->Step());
          plain.Step({0}, step, 1.0);
        }
        EXPECT_TRUE(internal::IsSame(model, plain_model));
        EXPECT_TRUE(internal::IsSame(optimizer->state(), plain.state()));
        return absl::OkStatus();
      });
    }
  }
}

TEST(OptimizerTest, LeavesAloneWhatIsFrozenOrHasNoGradient) {
  RunAlone([&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes), plain_model(kSizes);
    PlainTraining plain(&plain_model, kMomentum);
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kMomentum));
    for (int step = 0; step < 6; ++step) {
      const bool freezes = step == 2 || step == 3;
      model.params().SetTrainable(1, !freezes);
      plain_model.params().SetTrainable(1, !freezes);
      model.Backward(0, step);  // Parameter 1 keeps the state and memory of its last gradient.
      model.params().SetTrainable(4, false);
      plain_model.params().SetTrainable(4, false);
      EK_RETURN_IF_ERROR(optimizer->Step());
      plain.Step({0}, step, 1.0);
    }
    EXPECT_TRUE(internal::IsSame(model, plain_model));
    EXPECT_TRUE(internal::IsSame(optimizer->state(), plain.state()));
    EXPECT_EQ(optimizer->state().params.at(0).step, 6);
    EXPECT_EQ(optimizer->state().params.at(1).step, 4);
    EXPECT_FALSE(optimizer->state().params.contains(4));

    const std::string before = model.Bytes();
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(optimizer->Step());
    EXPECT_TRUE(model.Bytes() == before);
    EXPECT_TRUE(internal::IsSame(optimizer->state(), plain.state()));
    return absl::OkStatus();
  });
}

TEST(OptimizerTest, ScalesGradientsAndSkipsSteps) {
  RunAlone([&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes), plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), AdamW{}));
    const StepOptions options[] = {{.grad_scale = 0.25}, {.skip = true}, {.grad_scale = 3.0}};
    for (int step = 0; step < 3; ++step) {
      model.Backward(0, step);
      EK_RETURN_IF_ERROR(optimizer->Step(options[step]));
      plain.Step({0}, step, 1.0, options[step]);
    }
    EXPECT_TRUE(internal::IsSame(model, plain_model));
    EXPECT_TRUE(internal::IsSame(optimizer->state(), plain.state()));
    EXPECT_TRUE(absl::IsInvalidArgument(optimizer->Step({.grad_scale = std::nan("")})));
    return absl::OkStatus();
  });
}

TEST(OptimizerTest, TakesANewLearningRate) {
  RunAlone([&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes), plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), AdamW{}));
    for (int step = 0; step < 3; ++step) {
      EK_RETURN_IF_ERROR(optimizer->SetLearningRate(0.1 / (step + 1)));
      EXPECT_TRUE(plain.groups().SetLearningRate(0.1 / (step + 1)).ok());
      model.Backward(0, step);
      EK_RETURN_IF_ERROR(optimizer->Step());
      plain.Step({0}, step, 1.0);
    }
    EXPECT_TRUE(internal::IsSame(model, plain_model));
    EXPECT_TRUE(absl::IsInvalidArgument(optimizer->SetLearningRate(-1)));
    EXPECT_EQ(LearningRate(optimizer->groups()[0].rule), 0.1 / 3);
    return absl::OkStatus();
  });
}

TEST(OptimizerTest, GoesOnFromALoadedState) {
  RunAlone([&](Communicator& comm) -> absl::Status {
    for (const UpdateRule& rule : OneOfEach()) {
      TestModel model(kSizes), resumed_model(kSizes);
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), rule));
      EK_ASSIGN_OR_RETURN(auto resumed, Optimizer::Create(comm, resumed_model.params(), rule));
      for (int step = 0; step < 3; ++step) {
        model.Backward(0, step);
        EK_RETURN_IF_ERROR(optimizer->Step());
      }
      for (int i = 0; i < model.size(); ++i) {
        const auto from = model.params()[i].value.as<float>();
        std::copy(from.begin(), from.end(), resumed_model.params()[i].value.as<float>().begin());
      }
      const OptimizerState saved = optimizer->state();
      EK_RETURN_IF_ERROR(resumed->LoadState(saved));
      model.Backward(0, 3);
      resumed_model.Backward(0, 3);
      EK_RETURN_IF_ERROR(optimizer->Step());
      EK_RETURN_IF_ERROR(resumed->Step());
      EXPECT_TRUE(internal::IsSame(model, resumed_model));
      EXPECT_EQ(resumed->state(), optimizer->state());
      EXPECT_NE(saved, optimizer->state());
    }
    return absl::OkStatus();
  });
}

TEST(OptimizerTest, RefusesAStateThatDoesNotFit) {
  RunAlone([&](Communicator& comm) -> absl::Status {
    TestModel model({4, 2});
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), AdamW{}));
    model.Backward(0, 0);
    EK_RETURN_IF_ERROR(optimizer->Step());
    const OptimizerState good = optimizer->state();
    const auto refused = [&](OptimizerState state, absl::string_view says) {
      const absl::Status status = optimizer->LoadState(state);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), says)) << status;
    };
    OptimizerState wrong = good;
    wrong.params[2] = wrong.params[1];
    refused(wrong, "optimizer state of parameter 2, but there are 2 parameters");
    wrong = good;
    wrong.params[0].step = 0;
    refused(wrong, "parameter 0 \"p0\": its step is 0");
    wrong = good;
    wrong.params[1].tensors["exp_avg"] = StateTensor(DType::kFloat32, 3);
    refused(wrong, "parameter 1 \"p1\": exp_avg is float32[3], the parameter float32[2]");
    wrong = good;
    wrong.params[1].tensors["exp_avg"] = StateTensor(DType::kFloat64, 2);
    refused(wrong, "exp_avg is float64[2]");
    wrong = good;
    wrong.params[1].tensors.erase("exp_avg_sq");
    refused(wrong, "holds {exp_avg}, but AdamW(");
    EXPECT_EQ(optimizer->state(), good);
    return absl::OkStatus();
  });
}

TEST(OptimizerTest, RefusesWhatItCannotUpdate) {
  RunAlone([&](Communicator& comm) -> absl::Status {
    TestModel model({4});
    EXPECT_TRUE(absl::IsInvalidArgument(
        Optimizer::Create(comm, model.params(), AdamW{.beta1 = 2}).status()));
    ParameterSet params;
    std::vector<BFloat16> memory(6);
    params.AddSparse("half", absl::MakeSpan(memory), /*row_size=*/2);
    const absl::Status status = Optimizer::Create(comm, params, Sgd{}).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "parameter \"half\" is sparse")) << status;

    ParameterSet without;
    std::vector<float> value(3);
    without.Add("w", absl::MakeSpan(value));
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, without, AdamW{}));
    without.SetGradState(0, GradState::kReduced);
    const absl::Status no_memory = optimizer->Step();
    EXPECT_TRUE(absl::IsFailedPrecondition(no_memory)) << no_memory;
    EXPECT_TRUE(absl::StrContains(no_memory.message(), "\"w\"")) << no_memory;
    return absl::OkStatus();
  });
}

TEST(OptimizerTest, RefusesAGradientThatNobodyReduced) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kMomentum));
    const std::string before = model.Bytes();
    model.params().SetGradState(0, GradState::kReduced);
    model.params().SetGradState(2, GradState::kLocal);
    const absl::Status refused = optimizer->Step();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_TRUE(
        absl::StrContains(refused.message(), "\"p2\" holds this rank's own gradient, not reduced"))
        << refused;
    EXPECT_TRUE(model.Bytes() == before);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Without a DataParallel no object has made them equal.
TEST(OptimizerTest, RefusesToUpdateParametersThatTheRanksBeginWithDifferently) {
  for (const Placement& placement : {Placement(Replicated{}), Placement(WholeTensors{})}) {
    for (const bool joins : {false, true}) {
      if (joins && placement.index() == 0) continue;  // Exhausted ranks lack its gradients.
      SCOPED_TRACE(absl::StrCat("placement ", placement.index(), joins ? ", joined" : ""));
      std::vector<absl::Status> results(3);
      (void)RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
        TestModel model(kSizes);
        EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kMomentum,
                                                              {.placement = placement}));
        model.params()[4].value.as<float>()[3] += comm.rank() == 1 ? 1.0f : 0.0f;
        const std::string before = model.Bytes();
        const auto step = [&]() -> absl::Status {
          model.Backward(comm.rank(), 0);
          for (int i = 0; i < model.size(); ++i) {
            if (model.params().grad_state(i) != GradState::kNone && placement.index() == 0)
              model.params().SetGradState(i, GradState::kReduced);  // By a reduction of its own.
          }
          return optimizer->Step();
        };
        results[comm.rank()] =
            joins ? RunJoined(
                        {optimizer.get()}, {},
                        [&](JoinScope&) { return comm.rank() == 0 ? absl::OkStatus() : step(); })
                  : step();
        EXPECT_TRUE(model.Bytes() == before);
        return results[comm.rank()];
      });
      for (const absl::Status& result : results) {
        EXPECT_TRUE(absl::IsFailedPrecondition(result)) << result;
        EXPECT_TRUE(absl::StrContains(result.message(), "\"p4\" (tensor 4) differs on rank 1"))
            << result;
      }
    }
  }
}

TEST(OptimizerTest, ValuesOutsideOfItsGroupsMayDiffer) {
  for (const Placement& placement : {Placement(Replicated{}), Placement(WholeTensors{})}) {
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      TestModel model(kSizes);
      EK_ASSIGN_OR_RETURN(
          auto optimizer,
          Optimizer::Create(comm, model.params(),
                            {{.name = "shared", .params = {0, 1}, .rule = kMomentum}},
                            {.placement = placement}));
      model.params()[4].value.as<float>()[3] += static_cast<float>(comm.rank());
      model.Backward(0, 0);
      for (int i = 0; i < model.size(); ++i) {
        if (model.params().grad_state(i) != GradState::kNone && placement.index() == 0)
          model.params().SetGradState(i, GradState::kReduced);
      }
      return optimizer->Step();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(OptimizerTest, ValuesMayBecomeEqualAfterItIsMade) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    model.params()[0].value.as<float>()[0] += static_cast<float>(comm.rank());
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kMomentum));
    EK_RETURN_IF_ERROR(comm.Broadcast(model.params()[0].value, 0));
    for (int step = 0; step < 2; ++step) {
      model.Backward(/*rank=*/0, step);
      for (int i = 0; i < model.size(); ++i) {
        if (model.params().grad_state(i) != GradState::kNone)
          model.params().SetGradState(i, GradState::kReduced);
      }
      EK_RETURN_IF_ERROR(optimizer->Step());
      // Afterwards the program is responsible for them.
      model.params()[0].value.as<float>()[0] += static_cast<float>(comm.rank());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OptimizerTest, TellsEveryRankHowTheRanksDiffer) {
  const struct {
    std::vector<int64_t> sizes;
    UpdateRule rule;
    const char* says;
  } cases[] = {
      {{4, 9},
       AdamW{},
       "parameter 1: rank 2 has \"p1\" float32[9]; ranks 0,1 have \"p1\" float32[8]"},
      {{4}, AdamW{}, "the number of parameters: rank 2 has 1; ranks 0,1 have 2"},
      {{4, 8},
       AdamW{.learning_rate = 0.5},
       "group \"all\": rank 2 has learning_rate=0.5; ranks 0,1 have learning_rate=0.001"},
      {{4, 8}, AdamW{.beta1 = 7}, "rank 2: group \"all\": AdamW: beta1 is 7"},
  };
  for (const auto& wrong : cases) {
    const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
      const bool is_odd_one = comm.rank() == 2;
      TestModel model(is_odd_one ? wrong.sizes : std::vector<int64_t>{4, 8});
      const auto made = Optimizer::Create(comm, model.params(), is_odd_one ? wrong.rule : AdamW{});
      EXPECT_TRUE(absl::IsInvalidArgument(made.status())) << made.status();
      EXPECT_TRUE(absl::StrContains(made.status().message(), wrong.says)) << made.status();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Inputs per rank and epoch, next to what the ranks have in each step of the group.
std::vector<int> ActiveIn(const std::vector<int>& inputs, int step) {
  std::vector<int> active;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    if (step < inputs[rank]) active.push_back(static_cast<int>(rank));
  }
  return active;
}

// The learning rate that each loop sets before a step.
double Scheduled(int step) { return 0.1 / (1 + step % 3); }

absl::Status TrainJoined(Communicator& comm, const std::vector<std::vector<int>>& epochs,
                         const UpdateRule& rule) {
  const int world_size = comm.world_size();
  TestModel model(kSizes), plain_model(kSizes);
  PlainTraining plain(&plain_model, rule);
  EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
  EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), rule));
  for (size_t epoch = 0; epoch < epochs.size(); ++epoch) {
    const int first = static_cast<int>(epoch) * 100;
    EK_RETURN_IF_ERROR(RunJoined({optimizer.get(), ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < epochs[epoch][comm.rank()]; ++step) {
        EK_RETURN_IF_ERROR(optimizer->SetLearningRate(Scheduled(step)));
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        model.params().ClearGradients();
        model.Backward(comm.rank(), first + step);
        EK_RETURN_IF_ERROR(internal::Reduce(*ddp, model.params()));
        EK_RETURN_IF_ERROR(optimizer->Step({.grad_scale = 0.5, .skip = step == 2}));
      }
      return absl::OkStatus();
    }));
    for (int step = 0;; ++step) {
      const std::vector<int> active = ActiveIn(epochs[epoch], step);
      if (active.empty()) break;
      EXPECT_TRUE(plain.groups().SetLearningRate(Scheduled(step)).ok());
      plain.Step(active, first + step, 1.0 / world_size, {.grad_scale = 0.5, .skip = step == 2});
    }
    EXPECT_TRUE(internal::IsSame(model, plain_model))
        << "rank " << comm.rank() << " epoch " << epoch;
    EXPECT_TRUE(internal::IsSame(optimizer->state(), plain.state()))
        << "rank " << comm.rank() << " epoch " << epoch;
    EXPECT_EQ(optimizer->groups().rules(), plain.groups().rules());
  }
  return absl::OkStatus();
}

TEST(JoinedOptimizerTest, IsThePlainTrainingOnEveryRankWithStateAndLearningRate) {
  const std::vector<std::vector<std::vector<int>>> patterns = {
      {{2, 5}, {2, 2}},         {{4, 1}, {1, 3}},       {{0, 3}, {2, 2}},
      {{3, 0}, {0, 0}, {1, 1}}, {{3, 1, 2}, {1, 1, 1}}, {{0, 4, 0}, {2, 0, 1}},
  };
  for (const auto& epochs : patterns) {
    for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
      SCOPED_TRACE(testing::PrintToString(epochs) + " " + ToString(rule));
      const absl::Status status =
          RunTestRanks(static_cast<int>(epochs[0].size()),
                       [&](Communicator& comm) { return TrainJoined(comm, epochs, rule); });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// A rate that is set before the step in which all ranks stop is that of the next loop.
TEST(JoinedOptimizerTest, AfterAnEarlyStopAllRanksHaveTheSameRate) {
  for (const Placement& placement :
       {Placement(Replicated{}), Placement(Replicated{.update_in_backward = true}),
        Placement(WholeTensors{}), Placement(Slices{})}) {
    for (const int exhausted : {0, 1, 2}) {
      SCOPED_TRACE(absl::StrCat("placement ", placement.index(), ", rank ", exhausted));
      const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
        TestModel model(kSizes);
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
        EK_ASSIGN_OR_RETURN(auto optimizer,
                            Optimizer::Create(*ddp, kMomentum, {.placement = placement}));
        const bool steps = !(placement == Placement(Replicated{.update_in_backward = true}));
        const auto step = [&](int number) -> absl::Status {
          EK_RETURN_IF_ERROR(ddp->BeginStep());
          model.params().ClearGradients();
          model.Backward(comm.rank(), number);
          EK_RETURN_IF_ERROR(internal::Reduce(*ddp, model.params()));
          return steps ? optimizer->Step() : absl::OkStatus();
        };
        const absl::Status stopped =
            RunJoined({ddp.get(), optimizer.get()}, {.throw_on_early_termination = true},
                      [&](JoinScope&) -> absl::Status {
                        for (int i = 0; i < (comm.rank() == exhausted ? 2 : 4); ++i) {
                          EK_RETURN_IF_ERROR(optimizer->SetLearningRate(0.1 / (1 + i)));
                          EK_RETURN_IF_ERROR(step(i));
                        }
                        return absl::OkStatus();
                      });
        EXPECT_TRUE(absl::IsOutOfRange(stopped)) << stopped;
        EXPECT_EQ(std::get<Sgd>(optimizer->groups().rule_of(0)).learning_rate, 0.1 / 3)
            << "rank " << comm.rank();
        return RunJoined({ddp.get(), optimizer.get()}, {},
                         [&](JoinScope&) -> absl::Status { return step(5); });
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(JoinedOptimizerTest, RefusesToRepeatAStepWithoutTheGroupsGradients) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kMomentum));
    const absl::Status joined = RunJoined({optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
      EXPECT_TRUE(absl::IsFailedPrecondition(optimizer->LoadState({})));
      if (comm.rank() == 1) return absl::OkStatus();
      model.Backward(0, 0);
      for (int i = 0; i < model.size(); ++i) model.params().SetGradState(i, GradState::kReduced);
      return optimizer->Step();
    });
    EXPECT_EQ(absl::IsFailedPrecondition(joined), comm.rank() == 1)
        << joined;  // The other learns of its end.
    return joined;
  });
  EXPECT_TRUE(absl::StrContains(status.message(), "its DataParallel must join the loop, too"))
      << status;
}

}  // namespace
}  // namespace evenkeel
