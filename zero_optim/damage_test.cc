// A rank whose weights, state or gradients are damaged is named on all ranks, with every placement,
// in even and in uneven loops: check_replicas and check_finite. bucket/ has the tests without
// optimizers.

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;

const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33};
const AdamW kAdamW{.learning_rate = 0.05};
const Placement kPlacements[] = {
    Replicated{}, Replicated{.update_in_backward = true}, WholeTensors{.bucket_cap = Bytes{256}},
    Slices{},     Slices{.update_in_backward = true},     Slices{.overlap_forward = true}};

void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

void Set(const TensorView& tensor, int64_t k, float value) {
  if (tensor.dtype == DType::kFloat64) {
    tensor.as<double>()[k] = value;
  } else if (tensor.dtype == DType::kBFloat16) {
    tensor.as<BFloat16>()[k] = BFloat16(value);
  } else if (tensor.dtype == DType::kFloat16) {
    tensor.as<Float16>()[k] = Float16(value);
  } else {
    tensor.as<float>()[k] = value;
  }
}

// A large bit of the mantissa: the smallest may be rounded away by the next update.
void FlipBit(const TensorView& tensor) {
  const int64_t byte = tensor.dtype == DType::kBFloat16 ? 0 : SizeOf(tensor.dtype) - 2;
  static_cast<unsigned char*>(tensor.data)[byte] ^= 0x40;
}

struct Model {
  explicit Model(DType dtype) {
    for (const int64_t size : kSizes) {
      StateTensor& value = tensors.emplace_back(dtype, size);
      StateTensor& gradient = tensors.emplace_back(dtype, size);
      for (int64_t k = 0; k < size; ++k) Set(value.view(), k, static_cast<float>(k % 7) / 3 - 1);
      params.Add(absl::StrCat("p", params.size()), value.view(), gradient.view());
    }
    params.Add("tied", params[4].value);  // Shared: a second name.
  }
  void Backward(int rank, int step) {
    for (int p = 0; p < params.size(); ++p) {
      if (!params.trainable(p)) continue;
      for (int64_t k = 0; k < params[p].grad.count; ++k)
        Set(params[p].grad, k,
            static_cast<float>((7 * k + 3 * step + 5 * rank + p) % 11) / 8 - 0.6f);
      params.SetGradState(p, GradState::kLocal);
    }
  }
  std::deque<StateTensor> tensors;
  ParameterSet params;
};

struct Rank {
  explicit Rank(DType dtype = DType::kFloat32) : model(dtype) {}

  absl::Status Create(Communicator& comm, const Placement& placement, int64_t every,
                      const UpdateRule& rule = kAdamW) {
    EK_ASSIGN_OR_RETURN(
        ddp, DataParallel::Create(&comm, &model.params, {},
                                  {.reducer = {.caps = {Bytes{256}}, .check_finite = true},
                                   .check_replicas = {.every = every}}));
    EK_ASSIGN_OR_RETURN(
        optimizer, Optimizer::Create(*ddp, rule,
                                     {.placement = placement, .check_replicas = {.every = every}}));
    return absl::OkStatus();
  }
  absl::Status Step(int step) {
    model.params.ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    EK_RETURN_IF_ERROR(optimizer->WaitForAll());  // With overlap_forward: not before.
    model.Backward(ddp->communicator().rank(), step);
    if (step == bad_step) Set(model.params[4].grad, 5, std::numeric_limits<float>::quiet_NaN());
    EK_RETURN_IF_ERROR(internal::Reduce(*ddp, model.params));
    const auto* const replicated = std::get_if<Replicated>(&optimizer->placement());
    const bool has_step = replicated == nullptr || !replicated->update_in_backward;
    return has_step ? optimizer->Step() : absl::OkStatus();
  }
  absl::Status Steps(int begin, int end) {
    for (int step = begin; step < end; ++step) EK_RETURN_IF_ERROR(Step(step));
    return absl::OkStatus();
  }

  int bad_step = -1;  // With a gradient that is not a number.
  Model model;
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;  // Goes first.
};

std::string Differs(int world_size, int rank) {
  return world_size == 2 ? ": ranks 0 and 1 differ" : absl::StrCat(" differs on rank ", rank);
}

TEST(PlacementDamageTest, EqualReplicasPassWithEveryPlacementAlsoAfterFreezing) {
  for (const int world_size : {1, 2, 3, 5}) {
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      for (const Placement& placement : kPlacements) {
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
          SCOPED_TRACE(absl::StrCat(world_size, " ranks, placement ", placement.index()));
          Rank rank(dtype);
          EK_RETURN_IF_ERROR(rank.Create(comm, placement, /*every=*/1));
          for (int step = 0; step < 6; ++step) {
            rank.model.params.SetTrainable(1, step < 2 || step == 5);
            rank.model.params.SetTrainable(4, step > 2);
            EK_RETURN_IF_ERROR(rank.Step(step));
          }
          EK_RETURN_IF_ERROR(rank.optimizer->WaitForAll());
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST(PlacementDamageTest, ExhaustedRanksAreComparedAndPassWithEveryPlacement) {
  for (const Placement& placement : kPlacements) {
    SCOPED_TRACE(absl::StrCat("placement ", placement.index()));
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      Rank rank;
      EK_RETURN_IF_ERROR(rank.Create(comm, placement, /*every=*/1));
      for (int epoch = 0; epoch < 2; ++epoch) {
        EK_RETURN_IF_ERROR(RunJoined({rank.ddp.get(), rank.optimizer.get()}, {}, [&](JoinScope&) {
          return rank.Steps(0, comm.rank() == 1 ? 2 : 4 + 2 * comm.rank());
        }));
      }
      return rank.Steps(0, 2);
    });
  }
}

TEST(PlacementDamageTest, AFlippedWeightIsNamedWithEveryPlacement) {
  for (const int world_size : {2, 3, 5}) {
    for (const Placement& placement : kPlacements) {
      SCOPED_TRACE(absl::StrCat(world_size, " ranks, placement ", placement.index()));
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        Rank rank;
        EK_RETURN_IF_ERROR(rank.Create(comm, placement, /*every=*/2));
        EK_RETURN_IF_ERROR(rank.Steps(0, 4));
        EK_RETURN_IF_ERROR(rank.optimizer->WaitForAll());
        if (comm.rank() == world_size - 1) FlipBit(rank.model.params[4].value);
        EXPECT_THAT(rank.Step(4).message(),
                    HasSubstr(absl::StrCat("replicas differ after step 4: \"p4\" (tensor 4)",
                                           Differs(world_size, world_size - 1))));
        return absl::OkStatus();
      });
    }
  }
}

struct StateCase {
  std::string what;
  UpdateRule rule;
  DType dtype;
  std::string tensor;  // "step": the count; "": the parameter has no state.
};
const StateCase kStateCases[] = {
    {"momentum", Sgd{.learning_rate = 0.1, .momentum = 0.9}, DType::kFloat32, "momentum"},
    {"first moment", kAdamW, DType::kFloat32, "exp_avg"},
    {"second moment", Adam{}, DType::kFloat64, "exp_avg_sq"},
    {"master copy", kAdamW, DType::kBFloat16, "master"},
    {"step count", kAdamW, DType::kFloat32, "step"},
    {"no state", kAdamW, DType::kFloat32, ""},
};

TEST(PlacementDamageTest, AFlippedBitInStateIsNamedAtTheEndOfTheStep) {
  for (const int world_size : {2, 3, 5}) {
    for (const bool in_backward : {false, true}) {
      for (const StateCase& c : kStateCases) {
        SCOPED_TRACE(absl::StrCat(c.what, ", ", world_size, " ranks, in backward: ", in_backward));
        const std::string tensor = c.tensor.empty() ? "exp_avg" : c.tensor;
        const absl::Status status = RunTestRanks(world_size, [&](Communicator& comm) {
          Rank rank(c.dtype);
          EK_RETURN_IF_ERROR(rank.Create(comm, Replicated{.update_in_backward = in_backward},
                                         /*every=*/2, c.rule));
          EK_RETURN_IF_ERROR(rank.Steps(0, 3));
          if (comm.rank() == 1) {
            OptimizerState state = rank.optimizer->state();
            if (c.tensor.empty()) {
              state.params.erase(4);
            } else if (c.tensor == "step") {
              state.params[4].step += 1;
            } else {
              FlipBit(state.params[4].tensors[c.tensor].view());
            }
            EK_RETURN_IF_ERROR(rank.optimizer->LoadState(state));
          }
          const absl::Status differs = rank.Step(3);
          EXPECT_THAT(differs.message(),
                      HasSubstr(absl::StrCat("optimizer#0: replicas differ after step 4: \"p4: ",
                                             tensor, "\" (tensor ")));
          EXPECT_THAT(differs.message(), HasSubstr(Differs(world_size, 1)));
          return differs;
        });
        EXPECT_FALSE(status.ok());
      }
    }
  }
}

// A rank whose memory changes when its inputs have ended.
TEST(PlacementDamageTest, AnExhaustedRankIsNamedOnAllRanks) {
  for (const bool is_weight : {true, false}) {
    for (const Placement& placement : kPlacements) {
      if (!is_weight && placement.index() > 0) continue;
      SCOPED_TRACE(absl::StrCat("weight: ", is_weight, ", placement ", placement.index()));
      const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
        Rank rank;
        EK_RETURN_IF_ERROR(rank.Create(comm, placement, /*every=*/1));
        JoinOptions options;
        options.on_exhausted = [&](int64_t) {
          if (comm.rank() != 0) return;
          if (is_weight) return FlipBit(rank.model.params[4].value);
          const absl::StatusOr<StatePieces> state = rank.optimizer->Pieces();
          ASSERT_TRUE(state.ok()) << state.status();
          for (const StatePiece& piece : state->pieces) {
            if (piece.param == 4 && piece.tensor == "exp_avg") FlipBit(piece.data);
          }
        };
        const absl::Status ended =
            RunJoined({rank.ddp.get(), rank.optimizer.get()}, options,
                      [&](JoinScope&) { return rank.Steps(0, comm.rank() == 0 ? 2 : 6); });
        EXPECT_THAT(ended.message(), HasSubstr(is_weight ? "\"p4\" (tensor 4) differs on rank 0"
                                                         : "\"p4: exp_avg\" (tensor "));
        EXPECT_THAT(ended.message(), HasSubstr("differs on rank 0"));
        // Also on the rank that shadows: named by the object, and by the hook that called it.
        EXPECT_THAT(std::string(ended.message()), Not(testing::ContainsRegex("#0: [a-z_]+#0: ")));
        return ended;
      });
      EXPECT_THAT(status.message(), HasSubstr("replicas differ after step "));
    }
  }
}

TEST(PlacementDamageTest, RecoverMakesReplicasEqualAgain) {
  std::atomic<int> recovered_ranks = 0;
  (void)RunTestRanks(3, [&](Communicator& comm) -> absl::Status {  // This group ends with an error.
    Rank rank;
    EK_RETURN_IF_ERROR(rank.Create(comm, Replicated{}, /*every=*/1));
    EK_RETURN_IF_ERROR(rank.Steps(0, 3));
    if (comm.rank() == 2) FlipBit(rank.model.params[1].value);
    const absl::Status why = rank.Step(3);
    EXPECT_THAT(why.message(), HasSubstr("\"p1\" (tensor 1) differs on rank 2"));
    const absl::StatusOr<Recovered> recovered =
        Recover({rank.ddp.get(), rank.optimizer.get()}, comm, {.why = why});
    EXPECT_TRUE(recovered.ok()) << recovered.status();
    if (!recovered.ok()) return recovered.status();
    EXPECT_EQ(recovered->steps, 3);
    EXPECT_EQ(recovered->source, 0);
    const absl::Status equal = rank.Steps(3, 6);
    EXPECT_TRUE(equal.ok()) << equal;
    if (comm.rank() == 2) FlipBit(rank.model.params[1].value);
    EXPECT_THAT(rank.Step(6).message(), HasSubstr("\"p1\" (tensor 1) differs on rank 2"));
    ++recovered_ranks;
    return absl::OkStatus();
  });
  EXPECT_EQ(recovered_ranks, 3);
}

TEST(PlacementDamageTest, SettingsOfAnOptimizerMustBeValidAndEqual) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    Model model(DType::kFloat32);
    for (const Placement& placement : kPlacements) {
      const absl::Status status =
          Optimizer::Create(comm, model.params, kAdamW,
                            {.placement = placement, .check_replicas = {.every = -1}})
              .status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    }
    const absl::Status status = Optimizer::Create(comm, model.params, kAdamW,
                                                  {.check_replicas = {.every = 1 + comm.rank()}})
                                    .status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("check_replicas: rank 0 has every 1 steps"));
    EXPECT_THAT(status.message(), HasSubstr("rank 1 has every 2 steps"));
    return absl::OkStatus();
  });
}

TEST(PlacementDamageTest, ANaNIsNamedInEachTypeWithEveryPlacement) {
  for (const Placement& placement : kPlacements) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      for (const bool is_uneven : {false, true}) {
        SCOPED_TRACE(absl::StrCat("placement ", placement.index(), ", type ",
                                  static_cast<int>(dtype), ", uneven: ", is_uneven));
        const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
          Rank rank(dtype);
          EK_RETURN_IF_ERROR(rank.Create(comm, placement, /*every=*/0));
          if (comm.rank() == 1) rank.bad_step = 3;
          const int steps = is_uneven && comm.rank() == 0 ? 2 : 6;
          const absl::Status bad =
              RunJoined({rank.ddp.get(), rank.optimizer.get()}, {.enable = is_uneven},
                        [&](JoinScope&) { return rank.Steps(0, steps); });
          EXPECT_THAT(bad.message(),
                      HasSubstr("rank 1: the gradient of parameter \"p4\" (4) is not "
                                "finite in step 4: element 5 of 64"));
          return bad;
        });
        EXPECT_FALSE(status.ok());
      }
    }
  }
}

TEST(PlacementDamageTest, AnInfinityInAGradientThatWholeTensorsReducesIsNamed) {
  const auto train = [](int world_size, bool is_uneven, bool check_finite) {
    return RunTestRanks(world_size, [&](Communicator& comm) -> absl::Status {
      Model model(DType::kFloat32);
      EK_ASSIGN_OR_RETURN(const auto optimizer, Optimizer::Create(comm, model.params, kAdamW,
                                                                  {.placement = WholeTensors{},
                                                                   .check_finite = check_finite}));
      const int last = comm.world_size() - 1;
      const int steps = is_uneven && comm.rank() < last ? 2 : 6;
      return RunJoined({optimizer.get()}, {.enable = is_uneven}, [&](JoinScope&) {
        absl::Status status;
        for (int step = 0; status.ok() && step < steps; ++step) {
          model.params.ClearGradients();
          model.Backward(comm.rank(), step);
          if (comm.rank() == last && step == 3)
            Set(model.params[4].grad, 5, std::numeric_limits<float>::infinity());
          status = optimizer->Step();
        }
        return status;
      });
    });
  };
  for (const int world_size : {1, 3}) {
    for (const bool is_uneven : {false, true}) {
      const absl::Status status = train(world_size, is_uneven, /*check_finite=*/true);
      EXPECT_THAT(status.message(),
                  HasSubstr(absl::StrCat("rank ", world_size - 1,
                                         ": the gradient of parameter \"p4\" (4) is not finite in "
                                         "step 4: element 5 of 64")));
      EXPECT_THAT(status.message(), Not(HasSubstr("bucket")));
    }
  }
  EXPECT_TRUE(train(3, /*is_uneven=*/false, /*check_finite=*/false).ok());
}

TEST(PlacementDamageTest, ANaNInARowOfASparseGradientIsNamedInAnUnevenLoop) {
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) -> absl::Status {
    std::vector<float> table(12), rows = {1, 2, 3, 4, 5, 6};
    ParameterSet params;
    params.AddSparse("table", TensorView(absl::MakeSpan(table)), 3);
    EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &params, {},
                                                             {.reducer = {.check_finite = true},
                                                              .check_replicas = {.every = 1}}));
    EK_ASSIGN_OR_RETURN(const auto optimizer, Optimizer::Create(*ddp, Sgd{.learning_rate = 0.1},
                                                                {.check_replicas = {.every = 1}}));
    const absl::Status bad =
        RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < (comm.rank() == 0 ? 2 : 6); ++step) {
            if (comm.rank() == 1 && step == 3) rows[4] = std::numeric_limits<float>::infinity();
            params.ClearGradients();
            EK_RETURN_IF_ERROR(ddp->BeginStep());
            EK_RETURN_IF_ERROR(params.SetSparseGrad(0, std::vector<int64_t>{1, 3},
                                                    TensorView(absl::MakeSpan(rows))));
            EK_RETURN_IF_ERROR(ddp->GradientReady(0));
            EK_RETURN_IF_ERROR(ddp->FinishStep());
            EK_RETURN_IF_ERROR(optimizer->Step());
          }
          return absl::OkStatus();
        });
    EXPECT_THAT(bad.message(), HasSubstr("rank 1: the gradient of parameter \"table\" (0) is not "
                                         "finite in step 4: element 4 of 6, sparse"));
    return bad;
  });
  EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace evenkeel
