#include "evenkeel/zero_optim/loss_scaler.h"

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(NextScaleTest, HalvesAtOnceAndDoublesAfterManyGoodSteps) {
  const LossScalerOptions options = {.growth_interval = 3};
  LossScalerState state = {.scale = 65536};
  const std::vector<bool> found = {false, false, true,  true,  false,
                                   false, false, false, false, false};
  const std::vector<double> scales = {65536, 65536, 32768, 16384, 16384,
                                      16384, 32768, 32768, 32768, 65536};
  for (size_t step = 0; step < found.size(); ++step) {
    state = NextScale(options, state, found[step]);
    EXPECT_EQ(state.scale, scales[step]) << step;
  }
}

TEST(NextScaleTest, StaysBetweenTheLeastAndTheLargestScale) {
  const LossScalerOptions options = {
      .growth_interval = 1, .least_scale = 0.3, .largest_scale = 1000};
  LossScalerState state = {.scale = 600};
  state = NextScale(options, state, false);
  EXPECT_EQ(state.scale, 1000);
  for (int i = 0; i < 100; ++i) state = NextScale(options, state, true);
  EXPECT_EQ(state.scale, 0.3);
  // A loaded state beyond them is not pulled back at once, but goes no further.
  EXPECT_EQ(NextScale(options, {.scale = 0.1}, true).scale, 0.1);
  EXPECT_EQ(NextScale(options, {.scale = 5000}, false).scale, 5000);
  EXPECT_EQ(NextScale(options, {.scale = 5000}, true).scale, 2500);
}

TEST(LossScalerTest, RefusesOptionsThatCantBe) {
  const LossScalerOptions wrong[] = {
      {.initial_scale = 0},        {.initial_scale = NAN}, {.growth_factor = 0.5},
      {.growth_factor = INFINITY}, {.backoff_factor = 1},  {.backoff_factor = 0},
      {.growth_interval = 0},      {.least_scale = 0},     {.largest_scale = INFINITY},
      {.least_scale = 1 << 20},    {.largest_scale = 0.5}};
  for (const LossScalerOptions& options : wrong) {
    RunGroup(2, [&](Communicator& comm) -> absl::Status {
      EXPECT_TRUE(absl::IsInvalidArgument(LossScaler::Create(&comm, options).status()));
      const auto differ =
          LossScaler::Create(&comm, comm.rank() == 1 ? options : LossScalerOptions());
      EXPECT_TRUE(absl::IsInvalidArgument(differ.status()));
      EXPECT_TRUE(absl::StrContains(differ.status().message(), "rank 1")) << differ.status();
      return absl::OkStatus();
    });
  }
}

// Overflows happen while the scale is above what this model can bear: it falls until none is left,
// grows, and falls again. What is trained is what one rank trains that leaves out the same steps;
// scales are powers of two, so that they leave no trace in the gradients.
TEST(LossScalerTest, FindsItsScaleUnderUnevenInputsAndOnEveryRankAlike) {
  const LossScalerOptions options = {.initial_scale = 64, .growth_interval = 2};
  constexpr double kMost =
      10;  // Above this a gradient overflows, on the highest rank that has inputs.
  for (const std::vector<int>& inputs : std::vector<std::vector<int>>{
           {12}, {12, 12}, {3, 12}, {0, 7, 12}, {12, 1, 4}, {2, 9, 0, 12, 5}}) {
    SCOPED_TRACE(testing::PrintToString(inputs));
    const int world_size = static_cast<int>(inputs.size());
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, kMomentum));
      EK_ASSIGN_OR_RETURN(auto scaler, LossScaler::Create(&comm, options));
      TestModel& model = trainer->model;
      EK_RETURN_IF_ERROR(
          RunJoined({trainer->zero.get(), scaler.get()}, {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step < inputs[comm.rank()]; ++step) {
              model.params().ClearGradients();
              model.Backward(comm.rank(), step);
              for (int i = 0; i < model.size(); ++i) {
                for (float& g : model.params()[i].grad.as<float>())
                  g *= static_cast<float>(scaler->scale());
              }
              const bool overflows =
                  scaler->scale() > kMost && ActiveIn(inputs, step).back() == comm.rank();
              if (overflows) model.params()[step % 2].grad.as<float>()[0] = INFINITY;
              EK_RETURN_IF_ERROR(
                  trainer->zero->Step({.grad_scale = 1 / scaler->scale(), .skip_nonfinite = true}));
              EK_RETURN_IF_ERROR(scaler->Update(!trainer->zero->last_check()->is_finite));
            }
            return absl::OkStatus();
          }));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, kMomentum);
      LossScalerState state = {.scale = options.initial_scale};
      int skipped = 0;
      for (int step = 0; !ActiveIn(inputs, step).empty(); ++step) {
        const bool overflows = state.scale > kMost;
        if (!overflows) plain.Step(ActiveIn(inputs, step), step, 1.0 / world_size);
        skipped += overflows;
        state = NextScale(options, state, overflows);
      }
      EXPECT_GE(skipped, 5);  // Three to come down, then one after each growth.
      EXPECT_EQ(scaler->state(), state) << "rank " << comm.rank();
      return ExpectEqual(*trainer, plain_model, plain);
    });
  }
}

// An optimizer's check says nothing of ranks in other groups: those agree beside it.
TEST(LossScalerTest, IsAgreedOverALargerGroupThanTheOptimizers) {
  RunGroup(4, [&](Communicator& world) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto group, world.Split(world.rank() / 2, world.rank()));
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(*group, Mode::kZeroAlone, kMomentum));
    EK_ASSIGN_OR_RETURN(auto scaler, LossScaler::Create(group.get()));
    const std::string before = trainer->model.Bytes();
    trainer->model.Backward(group->rank(), 0);
    if (world.rank() == 3) trainer->model.params()[1].grad.as<float>()[0] = NAN;
    EK_ASSIGN_OR_RETURN(const GradientCheck check, trainer->zero->CheckGradients());
    EXPECT_EQ(check.is_finite, world.rank() < 2);
    EK_ASSIGN_OR_RETURN(const bool found, world.AgreeAny(!check.is_finite));
    EK_RETURN_IF_ERROR(trainer->zero->Step({.grad_scale = 1 / scaler->scale(), .skip = found}));
    EK_RETURN_IF_ERROR(scaler->Update(found));
    EXPECT_TRUE(trainer->model.Bytes() == before);
    EXPECT_EQ(scaler->scale(), 32768);
    return group->Finalize();
  });
}

TEST(LossScalerTest, TakesANewScaleThatIsTheSameOnAllRanks) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto scaler, LossScaler::Create(&comm, {.growth_interval = 2}));
    EXPECT_TRUE(absl::IsInvalidArgument(scaler->Update(false, 0.0)));
    EXPECT_TRUE(absl::IsInvalidArgument(scaler->Update(false, INFINITY)));
    EK_RETURN_IF_ERROR(RunJoined({scaler.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < 2 + comm.rank(); ++step)
        EK_RETURN_IF_ERROR(
            scaler->Update(step == 2, step == 3 ? std::optional(48.0) : std::nullopt));
      return absl::OkStatus();
    }));
    EXPECT_EQ(scaler->state(), (LossScalerState{.scale = 48, .good_steps = 0}));
    EK_RETURN_IF_ERROR(scaler->Update(true));
    EXPECT_EQ(scaler->scale(), 24);
    return absl::OkStatus();
  });
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto scaler, LossScaler::Create(&comm));
    EK_RETURN_IF_ERROR(scaler->Update(false, comm.rank() == 1 ? 8.0 : 4.0));
    return scaler->Update(false);
  });
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 has scale=8; ranks 0,2 have scale=4"))
      << status;
}

TEST(LossScalerTest, GoesOnFromASavedState) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    const LossScalerOptions options = {.growth_interval = 3};
    EK_ASSIGN_OR_RETURN(auto first, LossScaler::Create(&comm, options));
    for (const bool found : {true, false, false}) EK_RETURN_IF_ERROR(first->Update(found));
    EK_ASSIGN_OR_RETURN(const LossScalerState saved,
                        LossScalerState::Parse(first->state().Serialize()));
    EK_ASSIGN_OR_RETURN(auto second, LossScaler::Create(&comm, options));
    EK_RETURN_IF_ERROR(second->LoadState(saved));
    EK_RETURN_IF_ERROR(second->Update(false));
    EXPECT_EQ(second->scale(), 65536);
    EXPECT_TRUE(absl::IsInvalidArgument(second->LoadState({.scale = 0})));
    EXPECT_TRUE(absl::IsInvalidArgument(second->LoadState({.scale = NAN})));
    EXPECT_EQ(second->scale(), 65536);
    return RunJoined({second.get()}, {}, [&](JoinScope&) -> absl::Status {
      EXPECT_TRUE(absl::IsFailedPrecondition(second->LoadState(saved)));
      return absl::OkStatus();
    });
  });
}

TEST(LossScalerStateTest, NoBytesDoHarm) {
  Fuzz({LossScalerState{.scale = 65536, .good_steps = 7}.Serialize()}, Again<LossScalerState>);
}

}  // namespace
}  // namespace evenkeel::internal
