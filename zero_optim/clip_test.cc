// Norms of gradients, clipping, and steps that are left out because a gradient is not finite: on
// both optimizers, with and without inputs, in the optimizer's own group.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNorms[] = {1, 2, 3, kInfinityNorm};

// The test's own sum runs in another order: relative error at most the number of elements times
// that of a double. A norm's bound: sums that are added in another order differ in the last bits of
// float32.
const double kRelative = TheTestBackend().adds_in_rank_order ? 1e-12 : 1e-6;

TEST(ClipCoefficientTest, IsTheLimitOverTheNormButAtMostOne) {
  EXPECT_EQ(ClipCoefficient(1.0, 3.0), 1.0 / (3.0 + 1e-6));
  EXPECT_EQ(ClipCoefficient(1.0, 0.5), 1.0);
  EXPECT_EQ(ClipCoefficient(1.0, 0.0), 1.0);
  EXPECT_EQ(ClipCoefficient(kInf, 1e30), 1.0);
  EXPECT_EQ(ClipCoefficient(1.0, kInf), 0.0);
}

TEST(JoinedNormTest, IsTheNormOfAllParts) {
  EXPECT_DOUBLE_EQ(JoinedNorm({3, 4}), 5);
  EXPECT_DOUBLE_EQ(JoinedNorm({3, 4}, 1), 7);
  EXPECT_DOUBLE_EQ(JoinedNorm({3, 4, 1}, kInfinityNorm), 4);
  EXPECT_EQ(JoinedNorm({}), 0);
}

template <typename T>
void ExpectNorms() {
  std::mt19937_64 random(20240612);
  std::normal_distribution<double> normal;
  for (const int64_t count : {0, 1, 7, 8, 9, 1000}) {
    std::vector<T> gradient(count);
    for (T& element : gradient) element = static_cast<T>(normal(random));
    for (const double p : kNorms) {
      SCOPED_TRACE(absl::StrCat(count, " elements, norm ", p));
      double power = 0, most = 0;
      for (const T element : gradient) {
        power += std::pow(std::abs(static_cast<double>(element)), p);
        most = std::max(most, std::abs(static_cast<double>(element)));
      }
      const double norm = std::isinf(p) ? most : std::pow(power, 1 / p);
      GradientMeasure measure(4, p);
      measure.Add(2, TensorView(absl::MakeSpan(gradient)));
      const GradientCheck check = measure.Result(-0.5);
      EXPECT_TRUE(check.is_finite);
      EXPECT_NEAR(check.norm, norm / 2, kRelative * norm);
    }
  }
}

TEST(GradientMeasureTest, IsThePNormOfFloat32AndFloat64) {
  ExpectNorms<float>();
  ExpectNorms<double>();
}

// Also numbers whose squares no float32 holds.
TEST(GradientMeasureTest, FindsWhatIsNotFiniteWhereverItIs) {
  for (const int64_t count : {1, 8, 21}) {
    for (int64_t at = 0; at < count; ++at) {
      std::vector<float> gradient(count, 3e38f);
      for (const double p : kNorms) {
        GradientMeasure large(1, p);
        large.Add(0, TensorView(absl::MakeSpan(gradient)));
        EXPECT_TRUE(large.Result(1).is_finite);
        EXPECT_TRUE(std::isfinite(large.Result(1).norm));
      }
      for (const float bad : {INFINITY, -INFINITY, NAN}) {
        gradient[at] = bad;
        for (const double p : kNorms) {
          GradientMeasure measure(1, p);
          measure.Add(0, TensorView(absl::MakeSpan(gradient)));
          EXPECT_FALSE(measure.Result(1).is_finite) << bad << " at " << at << " of " << count;
          EXPECT_EQ(measure.Result(1).norm, kInf);
        }
      }
    }
  }
}

StepOptions Clip(double max_norm, double norm) {
  return {.clip = ClipOptions{.max_norm = max_norm, .norm = norm}};
}

TEST(ClipTest, EqualsOneRankForEveryNormAtAnyWorldSize) {
  for (int world_size : TestedWorldSizes()) {
    for (Mode mode : kAllModes) {
      for (double p : kNorms) {
        SCOPED_TRACE(absl::StrCat("world ", world_size, " ", ToString(mode), " norm ", p));
        RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, kMomentum));
          EXPECT_FALSE(trainer->zero->last_check().has_value());
          TestModel plain_model(kSizes), without_model(kSizes);
          PlainTraining plain(&plain_model, kMomentum), without(&without_model, kMomentum);
          for (int step = 0; step < 4; ++step) {
            StepOptions options =
                Clip(step == 2 ? 1e6 : 0.01, p);  // In one step there is nothing to do.
            options.grad_scale = 0.5;
            EK_RETURN_IF_ERROR(trainer->Step(step, options));
            plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
            without.Step(Ranks(world_size), step, 1.0 / world_size);
            const GradientCheck& check = *trainer->zero->last_check();
            EXPECT_TRUE(check.is_finite && !check.is_skipped);
            EXPECT_NEAR(check.norm, plain.norm(), kRelative * plain.norm());
            EXPECT_GT(check.norm, 0.01);
          }
          EXPECT_FALSE(plain_model.Bytes() == without_model.Bytes());
          EK_RETURN_IF_ERROR(trainer->Step(9));
          plain.Step(Ranks(world_size), 9, 1.0 / world_size);
          EXPECT_FALSE(trainer->zero->last_check().has_value());
          return ExpectEqual(*trainer, plain_model, plain);
        });
      }
    }
  }
}

// The same bits on every rank, and at every world size where the gradients are the same.
TEST(ClipTest, TheNormHasTheSameBitsShardedOrNot) {
  for (const double p : kNorms) {
    std::vector<double> norms;
    for (const int world_size : {1, 2, 3, 5}) {
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        TestModel model(kSizes);
        EK_ASSIGN_OR_RETURN(auto sharded, Optimizer::Create(comm, model.params(), AdamW{},
                                                            {.placement = WholeTensors{}}));
        EK_ASSIGN_OR_RETURN(auto whole, Optimizer::Create(comm, model.params(), AdamW{}));
        model.Backward(0, 0);
        for (int i = 0; i < model.size(); ++i) model.params().SetGradState(i, GradState::kReduced);
        EK_ASSIGN_OR_RETURN(const GradientCheck of_sharded, sharded->CheckGradients(p));
        EK_ASSIGN_OR_RETURN(const GradientCheck of_whole, whole->CheckGradients(p));
        EXPECT_EQ(of_sharded.norm, of_whole.norm);
        EK_RETURN_IF_ERROR(sharded->Step());
        if (comm.rank() == world_size - 1) norms.push_back(of_whole.norm);
        return absl::OkStatus();
      });
    }
    for (const double norm : norms) EXPECT_EQ(norm, norms[0]);
  }
}

// A learning rate that changes, clipping, inputs that run out: what one rank does with the same
// sums.
TEST(ClipTest, WithAScheduleUnderUnevenInputsEqualsOneRank) {
  const std::vector<std::vector<int>> patterns = {{1, 4},    {5, 2},    {0, 3},
                                                  {2, 4, 1}, {3, 0, 3}, {1, 2, 5, 0, 3}};
  for (const std::vector<int>& inputs : patterns) {
    for (Mode mode : kAllModes) {
      for (double p : {2.0, kInfinityNorm}) {
        SCOPED_TRACE(
            absl::StrCat(testing::PrintToString(inputs), " ", ToString(mode), " norm ", p));
        const int world_size = static_cast<int>(inputs.size());
        RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, AdamW{}));
          const auto rate = [](int step) { return 0.1 / (1 + step); };
          EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step < inputs[comm.rank()]; ++step) {
              EK_RETURN_IF_ERROR(trainer->zero->SetLearningRate(rate(step)));
              EK_RETURN_IF_ERROR(trainer->Step(step, Clip(0.05 * (1 + step), p)));
            }
            return absl::OkStatus();
          }));
          TestModel plain_model(kSizes);
          PlainTraining plain(&plain_model, AdamW{});
          for (int step = 0;; ++step) {
            const std::vector<int> active = ActiveIn(inputs, step);
            if (active.empty()) break;
            EK_RETURN_IF_ERROR(plain.groups().SetLearningRate(rate(step)));
            plain.Step(active, step, 1.0 / world_size, Clip(0.05 * (1 + step), p));
          }
          // Ranks without inputs measured what they own.
          EXPECT_NEAR(trainer->zero->last_check()->norm, plain.norm(), kRelative * plain.norm());
          return ExpectEqual(*trainer, plain_model, plain);
        });
      }
    }
  }
}

TEST(ClipTest, TheUnshardedOptimizerClipsOnEveryRankAlike) {
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{3}, {1, 4}, {2, 0, 3}, {4, 1, 1, 2, 3}}) {
    const int world_size = static_cast<int>(inputs.size());
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      TestModel model(kSizes), plain_model(kSizes);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), kMomentum));
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step < inputs[comm.rank()]; ++step) {
              EK_RETURN_IF_ERROR(ddp->BeginStep());
              model.params().ClearGradients();
              model.Backward(comm.rank(), step);
              EK_RETURN_IF_ERROR(Reduce(*ddp, model.params()));
              EK_RETURN_IF_ERROR(optimizer->Step(Clip(0.1, 2)));
            }
            return absl::OkStatus();
          }));
      PlainTraining plain(&plain_model, kMomentum);
      for (int step = 0; !ActiveIn(inputs, step).empty(); ++step) {
        plain.Step(ActiveIn(inputs, step), step, 1.0 / world_size, Clip(0.1, 2));
      }
      EXPECT_TRUE(IsSame(model, plain_model)) << "rank " << comm.rank();
      EXPECT_TRUE(IsSame(optimizer->state(), plain.state()));
      EXPECT_NEAR(optimizer->last_check()->norm, plain.norm(), kRelative * plain.norm());
      return absl::OkStatus();
    });
  }
}

// The groups train different models beside each other: a norm over the world would be another one,
// or never come.
TEST(ClipTest, TheNormIsThatOfTheOptimizersOwnGroupNotOfTheWorld) {
  RunGroup(5, [&](Communicator& world) -> absl::Status {
    const int color = world.rank() % 2;  // Three even ranks, two odd ones.
    EK_ASSIGN_OR_RETURN(auto group, world.Split(color, world.rank()));
    const int size = group->world_size(), steps = 2 + color;
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(*group, Mode::kZeroAlone, kMomentum));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, kMomentum);
    for (int step = 0; step < steps; ++step) {
      EK_RETURN_IF_ERROR(trainer->Step(step + 100 * color, Clip(0.05, 2)));
      plain.Step(Ranks(size), step + 100 * color, 1.0 / size, Clip(0.05, 2));
      const double norm = trainer->zero->last_check()->norm;
      EXPECT_NEAR(norm, plain.norm(), kRelative * plain.norm()) << "rank " << world.rank();
    }
    EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
    return group->Finalize();
  });
}

// Two optimizers over disjoint parameters, clipped by the norm of both; ranks without inputs take
// part in the checks.
TEST(ClipTest, SeveralOptimizersAreClippedByTheirJointNorm) {
  const std::vector<ParameterGroup> firsts = {
      {.name = "first", .params = {0, 1, 4}, .rule = kMomentum}};
  const std::vector<ParameterGroup> seconds = {
      {.name = "second", .params = {2, 3, 5}, .rule = kMomentum}};
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{3}, {3, 3}, {1, 3}, {3, 0, 2}}) {
    for (double p : kNorms) {
      const int world_size = static_cast<int>(inputs.size());
      SCOPED_TRACE(absl::StrCat(testing::PrintToString(inputs), " norm ", p));
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, firsts));
        EK_ASSIGN_OR_RETURN(auto second, Optimizer::Create(comm, trainer->model.params(), seconds,
                                                           {.placement = WholeTensors{}}));
        // Steps use gradients up, so clearing them is not necessary.
        const bool by_samples = inputs == std::vector<int>{3, 3};
        JoinOptions options;
        if (by_samples) options.divide_by = DivideBy::kSamples;
        EK_RETURN_IF_ERROR(RunJoined(
            {trainer->zero.get(), second.get()}, options, [&](JoinScope& scope) -> absl::Status {
              for (int step = 0; step < inputs[comm.rank()]; ++step) {
                if (!by_samples) trainer->model.params().ClearGradients();
                if (by_samples) EK_RETURN_IF_ERROR(scope.AddSamples(1));
                trainer->model.Backward(comm.rank(), step);
                EK_ASSIGN_OR_RETURN(const GradientCheck a, trainer->zero->CheckGradients(p));
                EK_ASSIGN_OR_RETURN(const GradientCheck b, second->CheckGradients(p));
                const double scale = ClipCoefficient(0.03, JoinedNorm({a.norm, b.norm}, p));
                EK_RETURN_IF_ERROR(trainer->zero->Step({.grad_scale = scale}));
                EK_RETURN_IF_ERROR(second->Step({.grad_scale = scale}));
              }
              return absl::OkStatus();
            }));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, kMomentum);
        for (int step = 0; !ActiveIn(inputs, step).empty(); ++step) {
          plain.Step(ActiveIn(inputs, step), step, 1.0 / world_size, Clip(0.03, p));
        }
        EXPECT_TRUE(IsSame(trainer->model, plain_model)) << "rank " << comm.rank();
        return absl::OkStatus();
      });
    }
  }
}

TEST(ClipTest, ACheckWithoutAStepLeavesTheGradientsToTheNextOne) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, kMomentum));
    trainer->model.Backward(comm.rank(), 0);
    EK_ASSIGN_OR_RETURN(const GradientCheck first, trainer->zero->CheckGradients());
    EK_ASSIGN_OR_RETURN(const GradientCheck again, trainer->zero->CheckGradients());
    EXPECT_EQ(first.norm, again.norm);
    EK_RETURN_IF_ERROR(StepControl::Of(comm).Enter("another step", 0).status());
    EK_RETURN_IF_ERROR(trainer->zero->Step());
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, kMomentum);
    plain.Step(Ranks(3), 0, 1.0 / 3);
    EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
    EXPECT_TRUE(absl::IsInvalidArgument(trainer->zero->CheckGradients(0.5).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(trainer->zero->Step(Clip(0, 2))));
    return absl::OkStatus();
  });
}

// An infinite or missing number on any one rank, in a parameter that any rank owns: nobody takes
// the step.
TEST(SkipNonfiniteTest, WhatOneRankHasIsSkippedByAll) {
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{4, 4, 4}, {1, 4, 4}, {4, 0, 4}}) {
    for (Mode mode : kAllModes) {
      for (int param : {0, 1, 2, 4, 5}) {
        for (const float bad : {INFINITY, NAN}) {
          RunGroup(3, [&](Communicator& comm) -> absl::Status {
            EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, AdamW{}));
            const StepOptions options = {.clip = ClipOptions{.max_norm = 0.1},
                                         .skip_nonfinite = true};
            EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) -> absl::Status {
              for (int step = 0; step < inputs[comm.rank()]; ++step) {
                if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(trainer->ddp->BeginStep());
                trainer->model.params().ClearGradients();
                trainer->model.Backward(comm.rank(), step);
                if (step == 2 && comm.rank() == 2)
                  trainer->model.params()[param].grad.as<float>().back() = bad;
                if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(trainer->Reduce());
                EK_RETURN_IF_ERROR(trainer->zero->Step(options));
                EXPECT_EQ(trainer->zero->last_check()->is_finite, step != 2);
                EXPECT_EQ(trainer->zero->last_check()->is_skipped, step == 2);
              }
              return absl::OkStatus();
            }));
            TestModel plain_model(kSizes);
            PlainTraining plain(&plain_model, AdamW{});
            for (int step = 0; step < 4; ++step) {
              if (step != 2) plain.Step(ActiveIn(inputs, step), step, 1.0 / 3, options);
            }
            return ExpectEqual(*trainer, plain_model, plain);
          });
        }
      }
    }
  }
}

TEST(RefuseNonfiniteTest, SaysWhatBecameOfTheStep) {
  EXPECT_TRUE(RefuseNonfinite(GradientCheck{.norm = 3}).ok());
  const struct {
    std::optional<GradientCheck> check;
    std::string message;
  } cases[] = {
      {std::nullopt, "did not check its gradients: call Step() with skip_nonfinite"},
      {GradientCheck{.norm = kInf, .is_finite = false, .is_skipped = true},
       "the weights are those of the previous step"},
      {GradientCheck{.norm = kInf, .is_finite = false}, "the weights are no longer finite"},
  };
  for (const auto& [check, message] : cases) {
    const absl::Status refused = RefuseNonfinite(check);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr(message));
  }
}

TEST(RefuseNonfiniteTest, EndsALoopOnAllRanksWithTheWeightsOfTheStepBefore) {
  for (Mode mode : kAllModes) {
    std::vector<absl::Status> results(3);
    const absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, mode, AdamW{}));
      int steps = 0;
      const auto loop = [&](JoinScope&) -> absl::Status {
        for (int step = 0; step < (comm.rank() == 0 ? 1 : 4); ++step) {
          if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(trainer->ddp->BeginStep());
          trainer->model.params().ClearGradients();
          trainer->model.Backward(comm.rank(), step);
          if (step == 2 && comm.rank() == 2)
            trainer->model.params()[0].grad.as<float>().back() = NAN;
          if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(trainer->Reduce());
          EK_RETURN_IF_ERROR(trainer->zero->Step({.skip_nonfinite = true}));
          EK_RETURN_IF_ERROR(RefuseNonfinite(trainer->zero->last_check()));
          ++steps;
        }
        return absl::OkStatus();
      };
      results[comm.rank()] = RunJoined(trainer->joinables(), {}, loop);
      EXPECT_EQ(steps, comm.rank() == 0 ? 1 : 2);
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, AdamW{});
      for (int step = 0; step < 2; ++step) plain.Step(ActiveIn({1, 4, 4}, step), step, 1.0 / 3, {});
      EXPECT_TRUE(IsSame(trainer->model, plain_model)) << "rank " << comm.rank();
      return results[comm.rank()];
    });
    EXPECT_FALSE(status.ok());
    for (const absl::Status& result : results) {
      EXPECT_THAT(std::string(result.message()),
                  testing::HasSubstr("a gradient is infinite or not a number"))
          << result;
    }
  }
}

}  // namespace
}  // namespace evenkeel::internal
