// An optimizer by slices with the DataParallel that brings it slices, against one process that
// trains alone.

#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

struct Way {
  bool updates = kInStep;
  bool overlaps = false;
  bool views = false;
};
constexpr Way kWays[] = {{},
                         {.views = true},
                         {.overlaps = true},
                         {.updates = kInBackward},
                         {.updates = kInBackward, .overlaps = true, .views = true}};
std::string ToString(const Way& way) {
  return absl::StrCat(way.updates == kInBackward ? "in backward" : "in step",
                      way.overlaps ? ", overlaps" : "", way.views ? ", views" : "");
}
SlicedRankOptions OptionsFor(const Way& way, DType dtype = DType::kFloat32) {
  SlicedRankOptions options{.dtype = dtype};
  options.placement = {.update_in_backward = way.updates, .overlap_forward = way.overlaps};
  options.reducer.gradient_as_bucket_view = way.views;
  return options;
}

// From the first step on, and over the step in which the buckets are made anew.
TEST(SlicedOptimizerTest, EqualsTheUnshardedOneBitForBitAtAnyWorldSize) {
  const UpdateRule rules[] = {Sgd{.learning_rate = 0.1}, kMomentum, Adam{.weight_decay = 0.1},
                              AdamW{}};
  for (int world_size : internal::TestedWorldSizes()) {
    for (const Way& way : kWays) {
      for (const UpdateRule& rule : rules) {
        for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
          if (!TheTestBackend().is_in_full && dtype == DType::kFloat64) continue;
          SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(way), " ", ToString(rule),
                                    " ", ToString(dtype)));
          RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
            EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, rule, OptionsFor(way, dtype)));
            TestModel plain_model(kSizes, dtype);
            PlainTraining plain(&plain_model, rule);
            for (int step = 0; step < 4; ++step) {
              const StepOptions options =
                  way.updates == kInBackward
                      ? StepOptions()
                      : StepOptions{.grad_scale = step == 1 ? 0.3 : 1.0, .skip = step == 2};
              EK_RETURN_IF_ERROR(rank->Step(step, options));
              plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
              EK_RETURN_IF_ERROR(rank->optimizer->WaitForAll());
              EXPECT_TRUE(internal::IsSame(rank->model, plain_model))
                  << "rank " << comm.rank() << ", step " << step;
            }
            return ExpectEqual(*rank, plain_model, plain.state());
          });
        }
      }
    }
  }
}

// A rank with slices beside one without, in the same group.
absl::Status ForBoth(Communicator& comm, const UpdateRule& rule, const SlicedRankOptions& options,
                     absl::FunctionRef<absl::Status(SlicedRank&, WholeRank&)> body) {
  EK_ASSIGN_OR_RETURN(auto sliced, SlicedRank::Create(comm, rule, options));
  EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(comm, rule, options));
  EK_RETURN_IF_ERROR(body(*sliced, *whole));
  return ExpectEqual(*sliced, whole->model, whole->optimizer->state());
}

// An Optimizer ignores a gradient that no rank has: no decay, and no step is counted.
TEST(SlicedOptimizerTest, LeavesAloneWhatNoRankHasAGradientOf) {
  for (int world_size : internal::TestedWorldSizes()) {
    for (const Way& way : kWays) {
      for (bool skips : {false, true}) {
        SCOPED_TRACE(
            absl::StrCat("world ", world_size, " ", ToString(way), skips ? ", skips buckets" : ""));
        SlicedRankOptions options = OptionsFor(way);
        options.reducer.skip_unused_buckets = skips;
        RunGroup(world_size, [&](Communicator& comm) {
          return ForBoth(comm, AdamW{.weight_decay = 0.1}, options,
                         [&](SlicedRank& sliced, WholeRank& whole) {
                           for (int step = 0; step < 5; ++step) {
                             std::set<int> without = {1 + step % 3, 4};
                             if (comm.rank() != 0) without.insert(5);  // Rank 0 has it.
                             EK_RETURN_IF_ERROR(sliced.Step(step, {}, without));
                             EK_RETURN_IF_ERROR(whole.Step(step, {}, without));
                             EK_RETURN_IF_ERROR(sliced.optimizer->WaitForAll());
                             EXPECT_TRUE(internal::IsSame(sliced.model, whole.model))
                                 << "rank " << comm.rank() << ", step " << step;
                           }
                           return absl::OkStatus();
                         });
        });
      }
    }
  }
}

// Several backwards, of which only the last reduces.
TEST(SlicedOptimizerTest, AccumulatesOverSeveralBackwards) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(ToString(way));
    RunGroup(3, [&](Communicator& comm) {
      return ForBoth(comm, kMomentum, OptionsFor(way),
                     [&](SlicedRank& sliced, WholeRank& whole) -> absl::Status {
                       for (int step = 0; step < 9; ++step) {
                         const StepMode mode =
                             step % 3 == 2 ? StepMode::kSync : StepMode::kAccumulate;
                         if (step % 3 == 0) sliced.model.params().ClearGradients();
                         if (step % 3 == 0) whole.model.params().ClearGradients();
                         EK_RETURN_IF_ERROR(sliced.Backward(step, mode));
                         if (mode == StepMode::kSync) EK_RETURN_IF_ERROR(sliced.optimizer->Step());
                         EK_RETURN_IF_ERROR(whole.Backward(step, mode));
                         if (mode == StepMode::kSync) EK_RETURN_IF_ERROR(whole.optimizer->Step());
                       }
                       return absl::OkStatus();
                     });
    });
  }
}

// A frozen parameter keeps its state and its step count, and an unfrozen one continues with them,
// also the first time.
TEST(SlicedOptimizerTest, EqualsTheUnshardedOneWhateverIsFrozen) {
  for (int world_size : internal::TestedWorldSizes()) {
    for (const Way& way : kWays) {
      SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(way)));
      SlicedRankOptions options = OptionsFor(way);
      options.frozen = {2, 5};
      RunGroup(world_size, [&](Communicator& comm) {
        return ForBoth(
            comm, AdamW{}, options, [&](SlicedRank& sliced, WholeRank& whole) -> absl::Status {
              for (int step = 0; step < 10; ++step) {
                for (ParameterSet* params : {&sliced.model.params(), &whole.model.params()}) {
                  params->SetTrainable(5, step >= 3);
                  params->SetTrainable(1, step < 2 || step >= 6);
                  params->SetTrainable(6, step != 4);
                  params->SetTrainable(0, step % 2 == 0);
                }
                EK_RETURN_IF_ERROR(sliced.Step(step));
                EK_RETURN_IF_ERROR(whole.Step(step));
              }
              return absl::OkStatus();
            });
      });
    }
  }
}

TEST(SlicedOptimizerTest, TakesBucketsOfSeveralTypes) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    std::vector<float> a(50, 1), a_grad(50, 0.5f);
    std::vector<double> b(70, 1), b_grad(70, 0.25);
    ParameterSet params;
    params.Add("a", absl::MakeSpan(a), absl::MakeSpan(a_grad));
    params.Add("b", absl::MakeSpan(b), absl::MakeSpan(b_grad));
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}));
    EK_ASSIGN_OR_RETURN(
        auto optimizer,
        Optimizer::Create(*ddp, Sgd{.learning_rate = 1, .momentum = 0.5}, {.placement = Slices{}}));
    for (int step = 0; step < 2; ++step) {
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int param : {0, 1}) {
        params.SetGradState(param, GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(param));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      EK_RETURN_IF_ERROR(optimizer->Step());
    }
    EXPECT_THAT(a, testing::Each(1 - 0.5f - 0.75f));
    EXPECT_THAT(b, testing::Each(1 - 0.25 - 0.375));
    return absl::OkStatus();
  });
}

// Total / N, and at most 16 elements per bucket and tensor of state more.
TEST(SlicedOptimizerTest, KeepsAnEqualShareOfTheStateOnEachRank) {
  for (int world_size : {1, 2, 3, 5, 8}) {
    for (int step_count : {1, 3}) {  // With the first plan, and with the one by order.
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
        EXPECT_EQ(rank->optimizer->state_bytes(), 0);
        for (int step = 0; step < step_count; ++step) EK_RETURN_IF_ERROR(rank->Step(step));
        int64_t total = 0;
        for (int64_t size : kSizes) total += size * 2 * 4;
        std::vector<int64_t> bytes = {rank->optimizer->state_bytes()};
        const int64_t buckets = static_cast<int64_t>(rank->ddp->buckets().size());
        EXPECT_LE(bytes[0], total / world_size + buckets * 16 * 2 * 4) << "rank " << comm.rank();
        EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(bytes), ReduceOp::kSum));
        EXPECT_EQ(bytes[0], total);
        return absl::OkStatus();
      });
    }
  }
}

TEST(SlicedOptimizerTest, LoadsAStateOfAnyWorldSizeShardedOrNot) {
  OptimizerState saved;
  std::string values;
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, WholeRank::Create(comm, AdamW{}));
    for (int step = 0; step < 2; ++step) EK_RETURN_IF_ERROR(rank->Step(step));
    saved = rank->optimizer->state();
    return absl::OkStatus();
  });
  for (int world_size : internal::TestedWorldSizes()) {
    for (int steps_before :
         {0, 1, 2}) {  // No plan is known, one is about to be made anew, one is in force.
      SCOPED_TRACE(absl::StrCat("world ", world_size, ", after ", steps_before, " steps"));
      SlicedRankOptions options;
      options.frozen = {6};  // It has state, but is in no bucket.
      RunGroup(world_size, [&](Communicator& comm) {
        return ForBoth(
            comm, AdamW{}, options, [&](SlicedRank& sliced, WholeRank& whole) -> absl::Status {
              for (int step = 0; step < steps_before; ++step) {
                EK_RETURN_IF_ERROR(sliced.Step(step));
                EK_RETURN_IF_ERROR(whole.Step(step));
              }
              EK_RETURN_IF_ERROR(sliced.optimizer->LoadState(saved));
              EK_RETURN_IF_ERROR(whole.optimizer->LoadState(saved));
              EK_ASSIGN_OR_RETURN(const OptimizerState all, sliced.optimizer->Consolidate());
              EXPECT_TRUE(all == saved);
              for (int step = 2; step < 5; ++step) {
                sliced.model.params().SetTrainable(6, step >= 3);
                whole.model.params().SetTrainable(6, step >= 3);
                EK_RETURN_IF_ERROR(sliced.Step(step));
                EK_RETURN_IF_ERROR(whole.Step(step));
              }
              EK_ASSIGN_OR_RETURN(const OptimizerState one,
                                  sliced.optimizer->Consolidate(world_size - 1));
              EXPECT_TRUE(internal::IsSame(one, comm.rank() == world_size - 1
                                                    ? whole.optimizer->state()
                                                    : OptimizerState()));
              return absl::OkStatus();
            });
      });
    }
  }
}

TEST(SlicedOptimizerTest, HasGroupsWithRulesOfTheirOwn) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes), plain_model(kSizes);
    const std::vector<ParameterGroup> groups = {
        {.name = "adam", .params = {0, 2, 4, 6}, .rule = AdamW{}},
        {.name = "sgd", .params = {1, 3, 5}, .rule = kMomentum}};
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, groups, {.placement = Slices{}}));
    PlainTraining plain(&plain_model, groups);
    for (int step = 0; step < 4; ++step) {
      EK_RETURN_IF_ERROR(optimizer->SetLearningRate("sgd", 0.1 / (1 + step)));
      EK_RETURN_IF_ERROR(plain.groups().SetLearningRate("sgd", 0.1 / (1 + step)));
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      model.Backward(comm.rank(), step);
      for (int param = 0; param < model.size(); ++param)
        EK_RETURN_IF_ERROR(ddp->GradientReady(param));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      EK_RETURN_IF_ERROR(optimizer->Step());
      plain.Step(Ranks(3), step, 1.0 / 3);
    }
    EXPECT_TRUE(internal::IsSame(model, plain_model));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, optimizer->Consolidate());
    EXPECT_TRUE(internal::IsSame(all, plain.state()));
    return absl::OkStatus();
  });
}

// Failures ----------------------------------------------------------------------------------------

TEST(SlicedOptimizerErrorsTest, SaysWhatIsNotASlice) {
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    EK_RETURN_IF_ERROR(rank->Step(0));
    rank->model.params().SetGradState(1, GradState::kLocal);
    absl::Status status = rank->optimizer->Step();
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("\"p1\" has a gradient that was not reduced"));
    rank->model.params().SetGradState(1, GradState::kReduced);
    status = rank->optimizer->Step();
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("made without TakeReduction()"));
    return absl::OkStatus();
  });
}

TEST(SlicedOptimizerErrorsTest, RefusesWhatAnUpdateInBackwardCanNotDo) {
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, OptionsFor({kInBackward})));
    EK_RETURN_IF_ERROR(rank->Backward(0));
    EXPECT_TRUE(absl::IsInvalidArgument(rank->optimizer->Step({.skip = true})));
    const absl::Status missed = rank->ddp->BeginStep();
    EXPECT_THAT(std::string(missed.message()),
                testing::HasSubstr("Step() was not called after the one before"));
    return absl::OkStatus();
  });
  RunGroup(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, OptionsFor({kInBackward})));
    EK_RETURN_IF_ERROR(rank->Backward(0));
    EK_RETURN_IF_ERROR(rank->optimizer->SetLearningRate(7));
    const absl::Status late = rank->optimizer->Step();
    EXPECT_THAT(std::string(late.message()), testing::HasSubstr("change them before BeginStep()"));
    return absl::OkStatus();
  });
}

// In both orders: the reducer's thread has begun the first bucket, or has not even got it.
TEST(SlicedOptimizerErrorsTest, RefusesAStepInTheMiddleOfAReduction) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(ToString(way));
    RunGroup(1, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, OptionsFor(way)));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, AdamW{});
      EK_RETURN_IF_ERROR(rank->Step(0));  // A step in mid-reduction could use its slices.
      plain.Step({0}, 0, 1.0);
      ParameterSet& params = rank->model.params();
      params.ClearGradients();
      const auto expect_refusal = [&] {
        const absl::Status early = rank->optimizer->Step();
        EXPECT_TRUE(absl::IsFailedPrecondition(early)) << early;
        EXPECT_THAT(std::string(early.message()), testing::HasSubstr("call it after FinishStep()"));
      };
      EK_RETURN_IF_ERROR(rank->ddp->BeginStep());
      expect_refusal();
      for (int param = params.size() - 1; param >= 0; --param) {
        EK_RETURN_IF_ERROR(rank->optimizer->WaitFor(param));
        rank->model.PutGradient(comm.rank(), /*step=*/1, param, /*adds=*/false);
        params.SetGradState(param, GradState::kLocal);
        EK_RETURN_IF_ERROR(rank->ddp->GradientReady(param));
        expect_refusal();
      }
      EK_RETURN_IF_ERROR(rank->ddp->FinishStep());
      EK_RETURN_IF_ERROR(rank->optimizer->Step());
      plain.Step({0}, 1, 1.0);
      return ExpectEqual(*rank, plain_model, plain.state());
    });
  }
}

TEST(SlicedOptimizerErrorsTest, AStepAfterAReductionThatFailedHasTheGroupsError) {
  const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    EK_RETURN_IF_ERROR(rank->ddp->BeginStep());
    comm.Abort(absl::CancelledError("the end of this group"));
    EXPECT_FALSE(rank->ddp->FinishStep().ok());
    return rank->optimizer->Step();
  });
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("the end of this group"));
  EXPECT_TRUE(absl::IsCancelled(status));
}

TEST(SlicedOptimizerErrorsTest, WantsOneReductionAndAllTrainedParametersInItsGroups) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    TestModel model(kSizes);
    const std::vector<ParameterGroup> groups = {
        {.name = "some", .params = {0, 1}, .rule = AdamW{}}};
    EK_ASSIGN_OR_RETURN(auto optimizer,
                        Optimizer::Create(comm, model.params(), groups, {.placement = Slices{}}));
    EK_ASSIGN_OR_RETURN(auto reduction, optimizer->TakeReduction());
    absl::Status status =
        DataParallel::Create(&comm, &model.params(), {}, {}, std::move(reduction)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("is trained but in none of its groups"));
    for (int param = 2; param < model.size(); ++param) model.params().SetTrainable(param, false);
    status = optimizer->TakeReduction().status();
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("TakeReduction() was called twice"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
