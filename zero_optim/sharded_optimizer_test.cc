#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(ShardedOptimizerTest, EqualsTheUnshardedOneBitForBitAtAnyWorldSize) {
  const UpdateRule rules[] = {Sgd{.learning_rate = 0.1}, kMomentum, Adam{.weight_decay = 0.1},
                              AdamW{}};
  for (int world_size : TestedWorldSizes()) {
    for (Mode mode : kAllModes) {
      for (const UpdateRule& rule : rules) {
        for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
          SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(mode), " ", ToString(rule),
                                    " ", ToString(dtype)));
          RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
            EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, rule, kSizes, {}, dtype));
            TestModel plain_model(kSizes, dtype);
            PlainTraining plain(&plain_model, rule);
            for (int step = 0; step < 3; ++step) {
              const StepOptions options = {.grad_scale = step == 1 ? 0.3 : 1.0, .skip = step == 2};
              EK_RETURN_IF_ERROR(trainer->Step(step, options));
              plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
            }
            return ExpectEqual(*trainer, plain_model, plain);
          });
        }
      }
    }
  }
}

TEST(ShardedOptimizerTest, KeepsEachStateOnItsOwnerOnly) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EXPECT_EQ(trainer->zero->state_bytes(), 0);
    EK_RETURN_IF_ERROR(trainer->Step(0));
    int64_t owned = 0;
    for (int i = 0; i < trainer->model.size(); ++i) {
      const bool is_owner = trainer->zero->owner(i) == comm.rank();
      EXPECT_EQ(trainer->zero->state().params.contains(i), is_owner) << i;
      if (is_owner) owned += kSizes[i];
    }
    EXPECT_EQ(trainer->zero->state_bytes(), owned * 2 * 4);
    std::vector<int64_t> bytes = {trainer->zero->state_bytes()};
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(bytes), ReduceOp::kSum));
    EXPECT_EQ(bytes[0], 405 * 2 * 4);
    return absl::OkStatus();
  });
}

TEST(ShardedOptimizerTest, HasRanksWithoutParametersTakePart) {
  for (Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
    RunGroup(5, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, AdamW{}, {40, 3}));
      TestModel plain_model({40, 3});
      PlainTraining plain(&plain_model, AdamW{});
      for (int step = 0; step < 2; ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        plain.Step(Ranks(5), step, 0.2);
      }
      EXPECT_EQ(trainer->zero->state_bytes() > 0, comm.rank() < 2);
      return ExpectEqual(*trainer, plain_model, plain);
    });
  }
}

TEST(ShardedOptimizerTest, UsesUpOwnGradientsAndLeavesReducedOnes) {
  for (bool skip : {false, true}) {
    RunGroup(2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, kMomentum));
      ParameterSet& params = trainer->model.params();
      trainer->model.Backward(comm.rank(), 0);
      params.SetGradState(0, GradState::kReduced);
      EK_RETURN_IF_ERROR(trainer->zero->Step({.skip = skip}));
      for (int i = 0; i < params.size(); ++i) {
        EXPECT_EQ(params.grad_state(i), i == 0 ? GradState::kReduced : GradState::kNone);
      }
      return absl::OkStatus();
    });
  }
}

// Gradients that only some ranks have count; a parameter that no rank has one of is left alone.
TEST(ShardedOptimizerTest, SumsWhatThereIsIfRanksLackGradients) {
  const auto has_gradient = [](int rank, int step, int param) {
    return param != 4 && (rank + step + param) % 3 != 0 && !(step == 2 && rank == 1);
  };
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, kMomentum));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, kMomentum);
    for (int step = 0; step < 4; ++step) {
      trainer->model.params().ClearGradients();
      trainer->model.Backward(comm.rank(), step);
      std::vector<std::vector<float>> sums;
      for (int param = 0; param < plain_model.size(); ++param) {
        if (!has_gradient(comm.rank(), step, param))
          trainer->model.params().SetGradState(param, GradState::kNone);
        std::vector<float>& sum = sums.emplace_back(kSizes[param]);
        std::vector<float> own(kSizes[param]);
        for (int rank = 0; rank < 3; ++rank) {
          plain_model.ComputeGradient(rank, step, param, absl::MakeSpan(own));
          for (size_t k = 0; k < own.size(); ++k)
            sum[k] += has_gradient(rank, step, param) ? own[k] : 0;
        }
        for (float& element : sum) element *= static_cast<float>(1.0 / 3);
      }
      std::vector<std::optional<TensorView>> gradients(sums.size());
      for (int param = 0; param < plain_model.size(); ++param) {
        bool is_there = false;
        for (int rank = 0; rank < 3; ++rank) is_there = is_there || has_gradient(rank, step, param);
        if (is_there) gradients[param] = TensorView(absl::MakeSpan(sums[param]));
      }
      plain.Update(gradients);
      EK_RETURN_IF_ERROR(trainer->zero->Step());
    }
    EXPECT_FALSE(plain.state().params.contains(4));
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(ShardedOptimizerTest, TakesReducedAndLocalGradientsInOneStep) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    for (int step = 0; step < 3; ++step) {
      trainer->model.Backward(comm.rank(), step);
      for (int param : {0, 3, 4}) {  // Reduced elsewhere.
        const TensorView grad = trainer->model.params()[param].grad;
        EK_RETURN_IF_ERROR(comm.user().AllReduce(grad, ReduceOp::kSum, {.scale = 0.5}).Wait());
        trainer->model.params().SetGradState(param, GradState::kReduced);
      }
      EK_RETURN_IF_ERROR(trainer->zero->Step());
      plain.Step({0, 1}, step, 0.5);
    }
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(ShardedOptimizerTest, AccumulatesOverSeveralBackwards) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel& model = trainer->model;
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    for (int step = 0; step < 2; ++step) {
      model.params().ClearGradients();
      for (int micro = 0; micro < 3; ++micro)
        model.Backward(comm.rank(), 10 * step + micro, /*accumulate=*/true);
      EK_RETURN_IF_ERROR(trainer->zero->Step());

      std::vector<std::vector<float>> sums;
      for (int param = 0; param < model.size(); ++param) {
        std::vector<float> own(kSizes[param]);
        std::vector<float>& sum =
            sums.emplace_back(kSizes[param], -0.0f);  // Changes nothing that is added to it.
        for (int rank = 0; rank < 2; ++rank) {
          std::vector<float> of_rank(kSizes[param], -0.0f);
          for (int micro = 0; micro < 3; ++micro) {
            plain_model.ComputeGradient(rank, 10 * step + micro, param, absl::MakeSpan(own));
            for (size_t k = 0; k < own.size(); ++k) of_rank[k] += own[k];
          }
          for (size_t k = 0; k < own.size(); ++k) sum[k] += of_rank[k];
        }
        for (float& element : sum) element *= 0.5f;
      }
      std::vector<std::optional<TensorView>> gradients;
      for (std::vector<float>& sum : sums) gradients.push_back(TensorView(absl::MakeSpan(sum)));
      plain.Update(gradients);
    }
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

TEST(ShardedOptimizerTest, EndsOnEveryRankWhenOneFailsOrLeaves) {
  for (bool leaves : {false, true}) {
    const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
      for (int step = 0; step < 3; ++step) {
        if (comm.rank() == 1 && step == 2)
          return leaves ? absl::OkStatus() : absl::DataLossError("no more data");
        const absl::Status stepped = trainer->Step(step);
        EXPECT_FALSE(stepped.ok() &&
                     step ==
                         2);  // The second step may still be under way when rank 1 is at the third.
        EXPECT_TRUE(stepped.ok() || absl::StrContains(stepped.message(), "rank 1")) << stepped;
        EK_RETURN_IF_ERROR(stepped);
      }
      return absl::OkStatus();
    });
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(absl::StrContains(status.message(), leaves ? "rank 1" : "no more data")) << status;
  }
}

TEST(ShardedOptimizerTest, AnotherGroupGoesOnWithAParameterThatNeverHadAGradient) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto next, comm.Split(0, -comm.rank()));
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    trainer->model.Backward(comm.rank(), 0);
    trainer->model.params().SetGradState(1, GradState::kNone);
    EK_RETURN_IF_ERROR(trainer->zero->Step());
    EK_RETURN_IF_ERROR(trainer->zero->ReplaceGroup(next.get()));
    EK_ASSIGN_OR_RETURN(const OptimizerState state, trainer->zero->Consolidate());
    EXPECT_FALSE(state.params.contains(1));
    EXPECT_EQ(state.params.size(), kSizes.size() - 1);
    trainer.reset();
    return next->Finalize();
  });
}

TEST(ShardedOptimizerTest, NamesAGradientWithoutMemory) {
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    ParameterSet params;
    std::vector<float> value(3);
    params.Add("w", absl::MakeSpan(value));
    EK_ASSIGN_OR_RETURN(auto zero,
                        Optimizer::Create(comm, params, AdamW{}, {.placement = WholeTensors{}}));
    params.SetGradState(0, GradState::kLocal);
    const absl::Status status = zero->Step();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(
        absl::StrContains(status.message(), "parameter 0 \"w\" has a gradient without memory"))
        << status;
    return absl::OkStatus();
  });
}

TEST(ShardedOptimizerTest, TellsEveryRankHowTheRanksDiffer) {
  const struct {
    std::vector<int64_t> sizes;
    std::vector<int> frozen;
    UpdateRule rule;
    const char* says;
  } cases[] = {
      {{4, 9},
       {},
       AdamW{},
       "parameter 1: rank 0 has \"p1\" float32[9]; ranks 1,2 have \"p1\" float32[8]"},
      {{4, 8, 1}, {}, AdamW{}, "the number of parameters: rank 0 has 3; ranks 1,2 have 2"},
      {{4, 8},
       {1},
       AdamW{},
       "the group of \"p1\": rank 0 has \"all\" (frozen); ranks 1,2 have \"all\""},
      {{4, 8}, {}, Sgd{}, "group \"all\": rank 0 has SGD; ranks 1,2 have AdamW"},
      {{4, 8}, {}, AdamW{.epsilon = -1}, "rank 0: group \"all\": AdamW: epsilon is -1"},
  };
  for (const auto& wrong : cases) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      const bool is_odd_one = comm.rank() == 0;
      const auto made = Trainer::Create(comm, Mode::kZeroAlone, is_odd_one ? wrong.rule : AdamW{},
                                        is_odd_one ? wrong.sizes : std::vector<int64_t>{4, 8},
                                        is_odd_one ? wrong.frozen : std::vector<int>{});
      EXPECT_TRUE(absl::IsInvalidArgument(made.status())) << made.status();
      EXPECT_TRUE(absl::StrContains(made.status().message(), wrong.says)) << made.status();
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace evenkeel::internal
