#include "evenkeel/zero_optim/sharded_optimizer.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/internal/test_model.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestDataParallel;
using internal::TestModel;
using testing::ElementsAre;

const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33};
const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};
const ShardedOptimizerOptions kSmallBuckets = {.bucket_cap = Bytes{256}};

void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

std::vector<int> Ranks(int world_size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return ranks;
}

// Who reduces the gradients.
enum class Mode { kZeroAlone, kDataParallelFirst, kZeroFirst };
constexpr Mode kAllModes[] = {Mode::kZeroAlone, Mode::kDataParallelFirst, Mode::kZeroFirst};
const char* ToString(Mode mode) {
  return mode == Mode::kZeroAlone ? "{&zero}" : mode == Mode::kZeroFirst ? "{&zero, &ddp}" : "{&ddp, &zero}";
}

// A rank with a model, a sharded optimizer, and gradients by `mode`.
struct Trainer {
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Communicator& comm, Mode mode, const UpdateRule& rule,
                                                         std::vector<int64_t> sizes = kSizes,
                                                         std::vector<int> frozen = {}, DType dtype = DType::kFloat32) {
    auto trainer = std::make_unique<Trainer>(std::move(sizes), dtype);
    trainer->comm = &comm;
    trainer->mode = mode;
    for (int param : frozen) trainer->model.params().SetTrainable(param, false);
    EK_ASSIGN_OR_RETURN(trainer->ddp, TestDataParallel::Create(&comm, &trainer->model.params()));
    EK_ASSIGN_OR_RETURN(trainer->zero, ShardedOptimizer::Create(&comm, &trainer->model.params(), rule, kSmallBuckets));
    return trainer;
  }
  Trainer(std::vector<int64_t> sizes, DType dtype) : model(std::move(sizes), dtype) {}

  std::vector<Joinable*> joinables() const {
    if (mode == Mode::kZeroAlone) return {zero.get()};
    if (mode == Mode::kZeroFirst) return {zero.get(), ddp.get()};
    return {ddp.get(), zero.get()};
  }
  absl::Status Step(int step, const StepOptions& options = {}) {
    if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.params().ClearGradients();
    model.Backward(comm->rank(), step);
    if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(ddp->Reduce());
    return zero->Step(options);
  }

  Communicator* comm = nullptr;
  Mode mode = Mode::kZeroAlone;
  TestModel model;
  std::unique_ptr<TestDataParallel> ddp;
  std::unique_ptr<ShardedOptimizer> zero;
};

// The rank's weights, and the state of all ranks together.
absl::Status ExpectEqual(Trainer& trainer, TestModel& plain_model, const PlainTraining& plain) {
  EXPECT_TRUE(trainer.model.Bytes() == plain_model.Bytes()) << "rank " << trainer.comm->rank();
  EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer.zero->Consolidate());
  EXPECT_TRUE(all == plain.state()) << "rank " << trainer.comm->rank();
  return absl::OkStatus();
}

TEST(ShardedOptimizerTest, EqualsTheUnshardedOneBitForBitAtAnyWorldSize) {
  const UpdateRule rules[] = {Sgd{.learning_rate = 0.1}, kMomentum, Adam{.weight_decay = 0.1}, AdamW{}};
  for (int world_size : {1, 2, 3, 5, 8}) {
    for (Mode mode : kAllModes) {
      for (const UpdateRule& rule : rules) {
        for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
          SCOPED_TRACE(
              absl::StrCat("world ", world_size, " ", ToString(mode), " ", ToString(rule), " ", ToString(dtype)));
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
        if (!has_gradient(comm.rank(), step, param)) trainer->model.params().SetGradState(param, GradState::kNone);
        std::vector<float>& sum = sums.emplace_back(kSizes[param]);
        std::vector<float> own(kSizes[param]);
        for (int rank = 0; rank < 3; ++rank) {
          plain_model.ComputeGradient(rank, step, param, absl::MakeSpan(own));
          for (size_t k = 0; k < own.size(); ++k) sum[k] += has_gradient(rank, step, param) ? own[k] : 0;
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
      for (int micro = 0; micro < 3; ++micro) model.Backward(comm.rank(), 10 * step + micro, /*accumulate=*/true);
      EK_RETURN_IF_ERROR(trainer->zero->Step());

      std::vector<std::vector<float>> sums;
      for (int param = 0; param < model.size(); ++param) {
        std::vector<float> own(kSizes[param]);
        std::vector<float>& sum = sums.emplace_back(kSizes[param], -0.0f);  // Changes nothing that is added to it.
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
    const absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
      for (int step = 0; step < 3; ++step) {
        if (comm.rank() == 1 && step == 2) return leaves ? absl::OkStatus() : absl::DataLossError("no more data");
        const absl::Status stepped = trainer->Step(step);
        EXPECT_EQ(stepped.ok(), step < 2) << stepped;
        EXPECT_TRUE(stepped.ok() || absl::StrContains(stepped.message(), "rank 1")) << stepped;
        EK_RETURN_IF_ERROR(stepped);
      }
      return absl::OkStatus();
    });
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(absl::StrContains(status.message(), leaves ? "rank 1" : "no more data")) << status;
  }
}

TEST(ShardedOptimizerTest, NamesAGradientWithoutMemory) {
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    ParameterSet params;
    std::vector<float> value(3);
    params.Add("w", absl::MakeSpan(value));
    EK_ASSIGN_OR_RETURN(auto zero, ShardedOptimizer::Create(&comm, &params, AdamW{}));
    params.SetGradState(0, GradState::kLocal);
    const absl::Status status = zero->Step();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "parameter 0 \"w\" is said to have a gradient")) << status;
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
      {{4, 9}, {}, AdamW{}, "rank 0: parameter 1 = p1 float32[9]"},
      {{4, 8, 1}, {}, AdamW{}, "rank 1: 2 parameters"},
      {{4, 8}, {1}, AdamW{}, "rank 0: parameter 1 = p1 float32[8], frozen; rank 1: parameter 1 = p1 float32[8]"},
      {{4, 8}, {}, Sgd{}, "rank 0: SGD(learning_rate=0.01"},
      {{4, 8}, {}, AdamW{.epsilon = -1}, "rank 0: AdamW: epsilon is -1"},
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

// Trainability -------------------------------------------------------------------------------------------------------

TEST(ShardedOptimizerFreezeTest, WhatWasNeverTrainedOwnsNothingAndDoesNotCount) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}, {10000, 8, 6, 4, 3}, {0}));
    std::vector<int> owners;
    for (int i = 0; i < 5; ++i) owners.push_back(trainer->zero->owner(i));
    EXPECT_THAT(owners, ElementsAre(kNoOwner, 0, 1, 1, 0));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
    EXPECT_FALSE(all.params.contains(0));
    return absl::OkStatus();
  });
}

// Which parameters are frozen in a step: some from the start, some again and again, all that one rank owns.
bool IsFrozen(int step, int param) {
  switch (param) {
    case 0:
      return step < 2;  // For the first time in step 2.
    case 1:
      return step == 1 || step == 2 || step >= 5;  // The giant.
    case 2:
      return step < 4;
    case 4:
      return step == 3;
    case 5:
      return true;  // Never.
    default:
      return false;
  }
}

void Freeze(ParameterSet& params, int step) {
  for (int param = 0; param < params.size(); ++param) params.SetTrainable(param, !IsFrozen(step, param));
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

// What is frozen stays out of the broadcasts, also if one rank owns nothing else: its replicas may even differ.
TEST(ShardedOptimizerFreezeTest, NeverSendsWhatIsFrozen) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, kMomentum, {100, 60, 30}));
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
      EK_RETURN_IF_ERROR(trainer->ddp->Reduce());
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
  const absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
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

// State --------------------------------------------------------------------------------------------------------------

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
        EXPECT_TRUE(all == (to == kAllRanks || to == comm.rank() ? plain.state() : OptimizerState())) << to;
      }
      EXPECT_TRUE(absl::IsInvalidArgument(trainer->zero->Consolidate(3).status()));
      return absl::OkStatus();
    });
  }
}

// Steps 0 and 1 with `world_before` ranks (0: unsharded), then the rest with `world_after` ranks, of which each has the
// same gradients, so that all of it equals one plain training.
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
        std::unique_ptr<ShardedOptimizer> sharded;
        if (world_before == 0) {
          EK_ASSIGN_OR_RETURN(unsharded, Optimizer::Create(&comm, &model.params(), rule));
        } else {
          EK_ASSIGN_OR_RETURN(sharded, ShardedOptimizer::Create(&comm, &model.params(), rule));
        }
        for (int step = 0; step < 2; ++step) {
          model.Backward(0, step);
          for (int i = 0; i < model.size(); ++i) model.params().SetGradState(i, GradState::kReduced);
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
      EXPECT_TRUE(saved == plain.state());
      for (int world_after : {1, 3}) {
        SCOPED_TRACE(absl::StrCat("from ", world_before, " to ", world_after, ToString(rule)));
        RunGroup(world_after, [&](Communicator& comm) -> absl::Status {
          TestModel model(kSizes);
          PlainTraining again(&model, rule);
          for (int step = 0; step < 2; ++step) again.Step({0}, step, 1.0);
          EK_ASSIGN_OR_RETURN(auto zero, ShardedOptimizer::Create(&comm, &model.params(), rule));
          const OptimizerState before = saved;
          EK_RETURN_IF_ERROR(zero->LoadState(saved));
          EXPECT_TRUE(saved == before);
          TestModel plain_model(kSizes);
          PlainTraining whole(&plain_model, rule);
          for (int step = 0; step < 4; ++step) {
            if (step >= 2) {
              model.Backward(0, step);
              for (int i = 0; i < model.size(); ++i) model.params().SetGradState(i, GradState::kReduced);
              EK_RETURN_IF_ERROR(zero->Step());
            }
            whole.Step({0}, step, 1.0);
          }
          EXPECT_TRUE(model.Bytes() == plain_model.Bytes());
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
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, kMomentum, kSizes, {1, 4}));
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
    EXPECT_TRUE(absl::StrContains(status.message(), "sharded_optimizer#0: optimizer state of parameter 5 \"p5\""))
        << status;
    return absl::OkStatus();
  });
}

// Join ---------------------------------------------------------------------------------------------------------------

// The ranks that have inputs in a step of an epoch, when rank r has inputs[r].
std::vector<int> ActiveIn(const std::vector<int>& inputs, int step) {
  std::vector<int> active;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    if (step < inputs[rank]) active.push_back(static_cast<int>(rank));
  }
  return active;
}

struct JoinedCase {
  Mode mode = Mode::kZeroAlone;
  UpdateRule rule;
  std::vector<std::vector<int>> epochs;  // Inputs per rank.
  bool freezes = false;
  bool by_initial = true;
  bool changes_settings = false;  // Learning rate, scale and skipped steps.
};

StepOptions OptionsOf(const JoinedCase& test, int step) {
  return {.grad_scale = test.changes_settings ? 0.5 : 1.0, .skip = test.changes_settings && step == 1};
}

absl::Status TrainJoined(Communicator& comm, const JoinedCase& test) {
  const int world_size = comm.world_size();
  const std::vector<int> frozen = test.freezes ? std::vector<int>{0, 2, 5} : std::vector<int>{};
  EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, test.mode, test.rule, kSizes, frozen));
  TestModel plain_model(kSizes);
  PlainTraining plain(&plain_model, test.rule);
  int begin = 0;  // The group's steps so far.
  for (const std::vector<int>& inputs : test.epochs) {
    EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {.divide_by_initial_world_size = test.by_initial},
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
      if (test.changes_settings) SetLearningRate(plain.rule(), 0.1 / (1 + step));
      plain.Step(active, step, 1.0 / (test.by_initial ? world_size : static_cast<int>(active.size())),
                 OptionsOf(test, step));
    }
    begin = step;
    EXPECT_EQ(trainer->zero->rule(), plain.rule());
    EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
  }
  return absl::OkStatus();
}

void ExpectPlainTraining(const JoinedCase& test) {
  SCOPED_TRACE(absl::StrCat(ToString(test.mode), " ", ToString(test.rule), " ", testing::PrintToString(test.epochs),
                            test.freezes ? " freezing" : "", test.by_initial ? "" : " by active ranks"));
  RunGroup(static_cast<int>(test.epochs[0].size()), [&](Communicator& comm) { return TrainJoined(comm, test); });
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
    ExpectPlainTraining({.mode = kAllModes[turn++ % 3], .rule = rule, .epochs = {inputs, {2, 2, 2}}});
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
    ExpectPlainTraining({.mode = mode, .rule = kMomentum, .epochs = {{1, 3, 2}, {2, 1, 1}}, .by_initial = false});
  }
}

TEST(JoinedShardedOptimizerTest, DryRanksFollowLearningRateScaleAndSkippedSteps) {
  for (Mode mode : kAllModes) {
    ExpectPlainTraining({.mode = mode, .rule = AdamW{}, .epochs = {{1, 4}, {3, 2}}, .changes_settings = true});
    ExpectPlainTraining({.mode = mode, .rule = kMomentum, .epochs = {{3, 0, 1}, {1, 1, 1}}, .changes_settings = true});
  }
}

// Also parameters that are trained for the first time, and get their owner, while ranks are dry.
TEST(JoinedShardedOptimizerTest, DryRanksFollowWhatIsFrozen) {
  for (Mode mode : kAllModes) {
    for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
      ExpectPlainTraining({.mode = mode, .rule = rule, .epochs = {{1, 6}, {2, 2}}, .freezes = true});
      ExpectPlainTraining({.mode = mode, .rule = rule, .epochs = {{4, 0, 2}, {2, 3, 1}}, .freezes = true});
      ExpectPlainTraining({.mode = mode, .rule = rule, .epochs = {{0, 0, 0, 7, 1}}, .freezes = true});
    }
  }
}

TEST(JoinedShardedOptimizerTest, TakesWhatARankFrozeWhenItRanDryFromTheOthers) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_RETURN_IF_ERROR(RunJoined({trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (comm.rank() == 0 ? 1 : 3); ++step) EK_RETURN_IF_ERROR(trainer->Step(step));
      trainer->model.params().SetTrainable("p1", comm.rank() != 0);  // For a next step, which the rank does not have.
      return absl::OkStatus();
    }));
    for (int step = 0; step < 3; ++step)
      plain.Step(step == 0 ? std::vector<int>{0, 1} : std::vector<int>{1}, step, 0.5);
    EXPECT_TRUE(trainer->model.params().trainable(1));
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

// Two backwards per step; rank 0 runs dry in mid-step, and what it had goes into the next step of the others.
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
        std::vector<float>& sum = sums.emplace_back(kSizes[param], -0.0f);  // Changes nothing that is added to it.
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
    EK_ASSIGN_OR_RETURN(auto other, Trainer::Create(comm, Mode::kZeroAlone, kMomentum, other_sizes));
    EK_RETURN_IF_ERROR(RunJoined({other->zero.get(), trainer->zero.get()}, {}, [&](JoinScope&) -> absl::Status {
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
        EXPECT_TRUE(last == (comm.rank() == 2 ? plain.state() : OptimizerState()));
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
        EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) { return train(); }));
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
        RunJoined({trainer->zero.get()}, {.throw_on_early_termination = true}, [&](JoinScope&) -> absl::Status {
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
    EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {.enable = false}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(trainer->Step(step));
      return absl::OkStatus();
    }));
    for (int step = 0; step < 3; ++step) plain.Step({0, 1}, step, 0.5);
    return ExpectEqual(*trainer, plain_model, plain);
  });
}

}  // namespace
}  // namespace evenkeel
