// The promises of an Optimizer with any placement, and the limits of each placement.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;
using testing::Each;
using testing::HasSubstr;

const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33};
const AdamW kRule{.learning_rate = 0.05};
const Placement kPlacements[] = {
    Replicated{}, Replicated{.update_in_backward = true}, WholeTensors{.bucket_cap = Bytes{256}},
    Slices{},     Slices{.update_in_backward = true},     Slices{.overlap_forward = true}};

bool HasStep(const Placement& placement) {
  return !(placement == Placement(Replicated{.update_in_backward = true}));
}

void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

struct Rank {
  explicit Rank(Communicator& comm) : comm(comm) {}

  absl::Status Create(const Placement& placement, int64_t check_replicas_every = 0) {
    EK_ASSIGN_OR_RETURN(
        ddp, DataParallel::Create(&comm, &model.params(), {}, {.reducer = {.caps = {Bytes{256}}}}));
    EK_ASSIGN_OR_RETURN(optimizer,
                        Optimizer::Create(*ddp, kRule,
                                          {.placement = placement,
                                           .check_replicas = {.every = check_replicas_every}}));
    return absl::OkStatus();
  }
  absl::Status Reduce(int step) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.Backward(comm.rank(), step);
    return internal::Reduce(*ddp, model.params());
  }
  absl::Status Step(int step) {
    EK_RETURN_IF_ERROR(Reduce(step));
    if (HasStep(optimizer->placement())) EK_RETURN_IF_ERROR(optimizer->Step());
    return optimizer->WaitForAll();
  }

  Communicator& comm;
  TestModel model{kSizes};
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;  // Goes first.
};

TEST(PlacementTest, AllGiveTheSameWeightsStateAndStepsOverOneReducer) {
  for (const int world_size : {1, 3}) {
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      Rank plain(comm);
      EK_RETURN_IF_ERROR(plain.Create(Replicated{}));
      for (int step = 0; step < 4; ++step) EK_RETURN_IF_ERROR(plain.Step(step));
      for (const Placement& placement : kPlacements) {
        SCOPED_TRACE(absl::StrCat(world_size, " ranks, placement ", placement.index()));
        Rank rank(comm);
        EK_RETURN_IF_ERROR(rank.Create(placement));
        EXPECT_TRUE(rank.optimizer->placement() == placement);
        for (int step = 0; step < 4; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
        EXPECT_TRUE(internal::IsSame(rank.model, plain.model));
        EXPECT_EQ(rank.optimizer->steps_finished(), 4);
        EK_ASSIGN_OR_RETURN(const OptimizerState all, rank.optimizer->Consolidate());
        EXPECT_TRUE(internal::IsSame(all, plain.optimizer->state()));
        EK_ASSIGN_OR_RETURN(const OptimizerState last, rank.optimizer->Consolidate(world_size - 1));
        EXPECT_EQ(last.params.empty(), comm.rank() != world_size - 1);
        EK_RETURN_IF_ERROR(rank.optimizer->LoadState(all));
        EK_ASSIGN_OR_RETURN(const OptimizerState loaded, rank.optimizer->Consolidate());
        EXPECT_TRUE(internal::IsSame(loaded, all));
      }
      return absl::OkStatus();
    });
  }
}

// A parameter per size, of 16 bits.
template <typename Half>
struct HalfModel {
  HalfModel() {
    for (const int64_t size : kSizes) {
      for (int64_t k = 0; k < size; ++k) values.emplace_back(static_cast<float>(k % 7) / 3 - 1);
      gradients.resize(values.size());
    }
    size_t begin = 0;
    for (const int64_t size : kSizes) {
      const auto part = [&](std::vector<Half>& all) {
        return absl::MakeSpan(all).subspan(begin, size);
      };
      params.Add(absl::StrCat("p", params.size()), part(values), part(gradients));
      begin += size;
    }
  }
  void Backward(int rank, int step) {
    for (size_t k = 0; k < gradients.size(); ++k)
      gradients[k] = Half(static_cast<float>((k + step) % 5) - static_cast<float>(rank));
    for (int i = 0; i < params.size(); ++i) params.SetGradState(i, GradState::kLocal);
  }
  std::vector<Half> values, gradients;
  ParameterSet params;
};

template <typename Half>
void ExpectSameHalvesWithEveryPlacement() {
  for (const int world_size : {1, 4}) {
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      std::vector<uint16_t> want;
      OptimizerState state;
      for (const Placement& placement : kPlacements) {
        SCOPED_TRACE(absl::StrCat(world_size, " ranks, placement ", placement.index()));
        HalfModel<Half> model;
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params, {},
                                                           {.reducer = {.caps = {Bytes{256}}}}));
        EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, AdamW{.learning_rate = 1e-4},
                                                              {.placement = placement}));
        for (int step = 0; step < 4; ++step) {
          model.params.ClearGradients();
          EK_RETURN_IF_ERROR(ddp->BeginStep());
          model.Backward(comm.rank(), step);
          EK_RETURN_IF_ERROR(internal::Reduce(*ddp, model.params));
          if (HasStep(placement)) EK_RETURN_IF_ERROR(optimizer->Step());
          EK_RETURN_IF_ERROR(optimizer->WaitForAll());
        }
        EK_ASSIGN_OR_RETURN(const OptimizerState all, optimizer->Consolidate());
        std::vector<uint16_t> got;
        for (const Half value : model.values) got.push_back(value.bits);
        if (want.empty()) {
          want = got;
          state = all;
          EXPECT_EQ(state.params.at(0).tensors.count("master"), 1);
        }
        EXPECT_TRUE(got == want);
        EXPECT_TRUE(all == state);
      }
      return absl::OkStatus();
    });
  }
}

// The gradients are small integers and the world size is a power of 2: averages are exact.
TEST(PlacementTest, AllUpdateSixteenBitsFromMasterCopies) {
  ExpectSameHalvesWithEveryPlacement<BFloat16>();
  ExpectSameHalvesWithEveryPlacement<Float16>();
}

void ExpectLacks(const absl::Status& status, const std::string& placement,
                 const std::string& what) {
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("the placement ", placement, " has no ", what)));
}

// A program's code after a step: it clamps the weights and adds them up.
class ClampedSum {
 public:
  explicit ClampedSum(ParameterSet& params) : params_(params) {}
  void Run() {
    ++calls;
    for (int i = 0; i < params_.size(); ++i) {
      float* const values = static_cast<float*>(params_[i].value.data);
      for (int64_t k = 0; k < params_[i].value.count; ++k)
        sum += values[k] = std::clamp(values[k], -0.3f, 0.3f);
    }
  }
  double rate() const { return 0.05 / (1 + calls); }

  double sum = 0;
  int calls = 0;

 private:
  ParameterSet& params_;
};

TEST(PlacementTest, FunctionsAfterTheUpdateRunOnAllRanksAsInOneProcess) {
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{3}, {3, 3}, {1, 4}, {4, 0, 2}}) {
    const int world_size = static_cast<int>(inputs.size());
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, kRule);
      ClampedSum want(plain_model.params());
      for (int step = 0; step < *std::max_element(inputs.begin(), inputs.end()); ++step) {
        std::vector<int> active;
        for (int rank = 0; rank < world_size; ++rank)
          if (step < inputs[rank]) active.push_back(rank);
        plain.Step(active, step, 1.0 / world_size);
        want.Run();
        EK_RETURN_IF_ERROR(plain.groups().SetLearningRate(want.rate()));
      }
      for (const Placement& placement : kPlacements) {
        SCOPED_TRACE(absl::StrCat("placement ", placement.index()));
        Rank rank(comm);
        EK_RETURN_IF_ERROR(rank.Create(placement));
        ClampedSum got(rank.model.params());
        const absl::Status added = rank.optimizer->AfterUpdate([&] {
          got.Run();
          return rank.optimizer->SetLearningRate(got.rate());
        });
        if (!HasStep(placement)) {
          ExpectLacks(added, "Replicated", "AfterUpdate() with update_in_backward");
          continue;
        }
        EK_RETURN_IF_ERROR(
            RunJoined({rank.ddp.get(), rank.optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
              for (int step = 0; step < inputs[comm.rank()]; ++step)
                EK_RETURN_IF_ERROR(rank.Step(step));
              return absl::OkStatus();
            }));
        EXPECT_TRUE(internal::IsSame(rank.model, plain_model)) << "rank " << comm.rank();
        EXPECT_NEAR(got.sum, want.sum, 1e-5);
        EXPECT_EQ(got.calls, want.calls);
        EXPECT_EQ(rank.optimizer->groups().rules(), plain.groups().rules());
      }
      return absl::OkStatus();
    });
  }
}

TEST(PlacementTest, AnErrorAfterTheUpdateIsReturnedAndOtherFunctionsAreNamed) {
  std::vector<absl::Status> ends(2);
  (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    EK_RETURN_IF_ERROR(rank.Create(Slices{}));
    int calls = 0;
    EK_RETURN_IF_ERROR(rank.optimizer->AfterUpdate([&]() -> absl::Status {
      return ++calls == 2 ? absl::DataLossError("no disk") : absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(rank.Step(0));
    EXPECT_EQ(rank.Step(1), absl::DataLossError("no disk"));
    EXPECT_EQ(rank.optimizer->steps_finished(), 2);
    EK_RETURN_IF_ERROR(rank.Step(2));
    if (comm.rank() == 1)
      EK_RETURN_IF_ERROR(rank.optimizer->AfterUpdate([] { return absl::OkStatus(); }));
    EK_RETURN_IF_ERROR(rank.Step(3));
    return ends[comm.rank()] = rank.Step(4);
  });
  for (const absl::Status& end : ends)
    EXPECT_THAT(std::string(end.message()), HasSubstr("rank 1 has functions after the step=2"));
}

TEST(PlacementTest, ARefusedCallNamesThePlacement) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    Rank replicated(comm), owners(comm), slices(comm);
    EK_RETURN_IF_ERROR(replicated.Create(Replicated{}));
    EK_RETURN_IF_ERROR(owners.Create(WholeTensors{}));
    EK_RETURN_IF_ERROR(slices.Create(Slices{}));
    ExpectLacks(replicated.optimizer->Rebalance(), "Replicated", "Rebalance()");
    ExpectLacks(replicated.optimizer->TakeReduction().status(), "Replicated", "TakeReduction()");
    ExpectLacks(owners.optimizer->TakeReduction().status(), "WholeTensors", "TakeReduction()");
    ExpectLacks(slices.optimizer->CheckGradients().status(), "Slices", "CheckGradients()");
    ExpectLacks(slices.optimizer->Rebalance(), "Slices", "Rebalance()");
    ExpectLacks(slices.optimizer->TakeReduction({.params = {1}}).status(), "Slices",
                "updates of a part in backward");
    for (const Rank* rank : {&replicated, &slices}) {
      EXPECT_EQ(rank->optimizer->owner(1), kNoOwner);
      EXPECT_EQ(rank->optimizer->imbalance(), 1.0);
    }
    EXPECT_NE(owners.optimizer->owner(1), kNoOwner);
    for (const Rank* rank : {&replicated, &owners, &slices}) {
      EXPECT_TRUE(absl::IsInvalidArgument(rank->optimizer->WaitFor(99)));
      EXPECT_TRUE(absl::IsInvalidArgument(rank->optimizer->Consolidate(2).status()));
    }
    return absl::OkStatus();
  });
}

TEST(PlacementTest, WithoutAReducersReductionAnUpdateInBackwardIsRefused) {
  RunGroup(1, [](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    const OptimizerOptions options{.placement = Replicated{.update_in_backward = true}};
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kRule, options));
    const absl::Status status = optimizer->Step();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no reducer has its reduction"));
    return absl::OkStatus();
  });
}

TEST(PlacementTest, RanksWithDifferentPlacementsAreTold) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    const Placement placement = comm.rank() == 1 ? Placement(Replicated{}) : Placement(Slices{});
    const absl::Status made =
        Optimizer::Create(comm, model.params(), kRule, {.placement = placement}).status();
    EXPECT_EQ(made,
              absl::InvalidArgumentError("optimizer#0: the placement: rank 1 has Replicated; ranks "
                                         "0,2 have Slices: the ranks disagree"));
    // The group goes on.
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kRule));
    EXPECT_EQ(optimizer->join_name(), "optimizer#1");
    return comm.Barrier();
  });
}

// Such as one that the rank's program has cleared after the reduction.
TEST(PlacementTest, AGradientThatOneRankLacksIsFound) {
  std::vector<std::string> texts(3);
  (void)RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    EK_RETURN_IF_ERROR(rank.Create(Replicated{}));
    EK_RETURN_IF_ERROR(rank.Reduce(0));
    if (comm.rank() == 1) rank.model.params().SetGradState(2, GradState::kNone);
    EK_RETURN_IF_ERROR(rank.optimizer->Step());
    const absl::Status next = rank.Reduce(1);
    texts[comm.rank()] = std::string(next.message());
    return next;
  });
  EXPECT_THAT(texts,
              Each(testing::ContainsRegex(
                  "optimizer#0: step 1 was taken with different settings: rank 1 has "
                  "missing gradients=1 \\(\"p2\" [0-9a-f]+\\); ranks 0,2 have none of these")));
}

// In one process the step is the same without it.
TEST(PlacementTest, AGradientWithoutElementsThatOneRankLacksIsNotMissing) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    for (const Placement& placement : {kPlacements[0], kPlacements[2], kPlacements[3]}) {
      Rank rank(comm);
      EK_RETURN_IF_ERROR(rank.Create(placement, /*check_replicas_every=*/1));
      for (int step = 0; step < 2; ++step) {
        EK_RETURN_IF_ERROR(rank.Reduce(step));
        if (comm.rank() == 1) rank.model.params().SetGradState(3, GradState::kNone);
        EK_RETURN_IF_ERROR(rank.optimizer->Step());
      }
      EK_RETURN_IF_ERROR(rank.optimizer->WaitForAll());
    }
    return absl::OkStatus();
  });
}

// They are part of the record that each step sends.
TEST(PlacementTest, MissingGradientsAreNamedInTheStepsThatChangeThem) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    for (const Placement& placement : {kPlacements[0], kPlacements[2], kPlacements[3]}) {
      Rank rank(comm);
      EK_RETURN_IF_ERROR(rank.Create(placement));
      ParameterSet& params = rank.model.params();
      const auto missing_after = [&](int step) -> absl::StatusOr<std::string> {
        EK_RETURN_IF_ERROR(rank.Step(step));
        const std::string ledger =
            StepControl::Of(comm).ledger().Serialize(StepLedger::Plans::kWith);
        const size_t begin = ledger.find(absl::StrCat(rank.optimizer->join_name(), "\t"));
        const std::string line = ledger.substr(begin, ledger.find('\n', begin) - begin);
        const size_t at = line.find("missing gradients=");
        return at == std::string::npos ? "" : line.substr(at, 26);
      };
      for (const int param : {0, 1, 2}) params.SetTrainable(param, false);
      EK_ASSIGN_OR_RETURN(const std::string first, missing_after(0));
      EXPECT_EQ(first, "missing gradients=3 (\"p0\" ");
      EK_ASSIGN_OR_RETURN(const std::string second, missing_after(1));
      EXPECT_EQ(second, "");
      params.SetTrainable(1, true);
      EK_ASSIGN_OR_RETURN(const std::string third, missing_after(2));
      EXPECT_EQ(third, "missing gradients=2 (\"p0\" ");
      for (const int param : {0, 2}) params.SetTrainable(param, true);
      EK_ASSIGN_OR_RETURN(const std::string fourth, missing_after(3));
      EXPECT_EQ(fourth, "missing gradients=0");
    }
    return absl::OkStatus();
  });
}

TEST(PlacementTest, ARankWithAnotherPlacementDoesNotComeIntoAGroup) {
  for (const Placement& first : {Placement(Replicated{}), Placement(WholeTensors{})}) {
    std::vector<std::string> texts(2);
    (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto alone, comm.Split(comm.rank(), 0));
      TestModel model(kSizes);
      const Placement placement = comm.rank() == 0 ? first : Placement(Slices{});
      EK_ASSIGN_OR_RETURN(const auto optimizer, Optimizer::Create(*alone, model.params(), kRule,
                                                                  {.placement = placement}));
      EK_RETURN_IF_ERROR(alone->Finalize());
      const absl::Status entered = optimizer->ReplaceGroup(&comm);
      texts[comm.rank()] = std::string(entered.message());
      return entered;
    });
    const std::string name =
        std::holds_alternative<Replicated>(first) ? "Replicated" : "WholeTensors";
    EXPECT_THAT(texts, Each(HasSubstr(absl::StrCat("the placement: rank 0 has ", name,
                                                   "; rank 1 has Slices: the ranks disagree"))));
  }
}

// All ranks get the error, and the reducer goes on with what it had.
TEST(PlacementTest, AReducerTakesOneReduction) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    Rank rank(comm), plain(comm);
    EK_RETURN_IF_ERROR(plain.Create(Replicated{}));
    EK_RETURN_IF_ERROR(rank.Create(Slices{}));
    for (int step = 0; step < 2; ++step) {
      EK_RETURN_IF_ERROR(plain.Step(step));
      EK_RETURN_IF_ERROR(rank.Step(step));
      const absl::Status second =
          Optimizer::Create(*rank.ddp, kRule, {.placement = Slices{}}).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
      EXPECT_THAT(std::string(second.message()),
                  HasSubstr("gradients are already reduced by compression or"));
    }
    EXPECT_TRUE(internal::IsSame(rank.model, plain.model));
    return absl::OkStatus();
  });
}

TEST(PlacementTest, AReductionThatDoesNotFitLeavesTheReducerAsItWas) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    Rank rank(comm), plain(comm);
    EK_RETURN_IF_ERROR(plain.Create(Replicated{}));
    EK_RETURN_IF_ERROR(rank.Create(Replicated{}));
    const std::vector<ParameterGroup> some = {{.name = "some", .params = {0, 1}, .rule = kRule}};
    for (int step = 0; step < 3; ++step) {
      EK_RETURN_IF_ERROR(plain.Step(step));
      EK_RETURN_IF_ERROR(rank.Step(step));
      const absl::Status refused =
          Optimizer::Create(*rank.ddp, some, {.placement = Slices{}}).status();
      EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
      EXPECT_THAT(std::string(refused.message()),
                  HasSubstr("is trained but in none of its groups"));
    }
    EXPECT_TRUE(internal::IsSame(rank.model, plain.model));
    return absl::OkStatus();
  });
}

TEST(PlacementTest, AnOptimizerMayBeDestroyedBeforeItsReducerAlsoInsideAStep) {
  for (const Placement& placement : kPlacements) {
    const bool has_reduction =
        !(placement == Placement(Replicated{})) && !std::holds_alternative<WholeTensors>(placement);
    for (const bool inside : {false, true}) {
      SCOPED_TRACE(absl::StrCat("placement ", placement.index(), inside ? ", inside" : ""));
      std::vector<absl::Status> ends(2);
      (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
        Rank rank(comm);
        EK_RETURN_IF_ERROR(rank.Create(placement));
        absl::Status& end = ends[comm.rank()];
        for (int step = 0; step < 2 && end.ok(); ++step) end = rank.Step(step);
        if (!end.ok()) return end;  // The other rank may be in the step that is refused.
        rank.model.params().ClearGradients();
        if (!inside) rank.optimizer.reset();
        end = rank.ddp->BeginStep();
        if (!end.ok()) return end;
        rank.model.Backward(comm.rank(), 2);
        const auto announced = [&](int first, int last) {
          for (int param = first; param > last && end.ok(); --param) {
            end = rank.model.params().grad_state(param) == GradState::kNone
                      ? rank.ddp->NoGradient(param)
                      : rank.ddp->GradientReady(param);
          }
        };
        announced(rank.model.size() - 1, 2);
        rank.optimizer.reset();
        announced(2, -1);
        if (end.ok()) end = rank.ddp->FinishStep();
        return end;
      });
      for (const absl::Status& end : ends) {
        EXPECT_EQ(end.ok(), !has_reduction) << end;
        if (end.ok()) continue;
        EXPECT_THAT(std::string(end.message()),
                    HasSubstr("optimizer#0, which updates what this DataParallel reduces, has been "
                              "destroyed: keep it as long as steps begin"));
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel
