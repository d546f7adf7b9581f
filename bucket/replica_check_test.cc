// DataParallelOptions::check_replicas: parameters and buffers. zero_optim/damage_test.cc has
// optimizers.

#include "evenkeel/bucket/replica_check.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 8, 2};

void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

// A large bit of the mantissa: the smallest may be rounded away by the next update.
void FlipBit(ToyModel& model, int param) {
  static_cast<unsigned char*>(model.params()[param].value.data)[2] ^= 0x40;
}

// With an optimizer of its own, which exhausted ranks do not run.
struct Rank {
  explicit Rank(Communicator& comm) : comm(comm) {}
  absl::Status Create(DataParallelOptions options, std::vector<TensorView> buffers = {}) {
    EK_ASSIGN_OR_RETURN(ddp,
                        DataParallel::Create(&comm, &model.params(), std::move(buffers), options));
    return absl::OkStatus();
  }
  absl::Status Step(int step, StepMode mode = StepMode::kSync) {
    EK_RETURN_IF_ERROR(ddp->BeginStep(mode));
    model.Forward(comm.rank(), step);
    EK_RETURN_IF_ERROR(
        model.Backward(comm.rank(), step, [this](int param) { return ddp->GradientReady(param); }));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    if (mode == StepMode::kAccumulate) return absl::OkStatus();
    for (int p = 0; p < model.params().size(); ++p) {
      if (model.params().grad_state(p) == GradState::kNone) continue;
      const std::vector<float> gradient = model.Gradient(p);
      for (size_t j = 0; j < gradient.size(); ++j) value(p)[j] -= 0.1f * gradient[j];
    }
    model.params().ClearGradients();
    return absl::OkStatus();
  }
  float* value(int param) { return static_cast<float*>(model.params()[param].value.data); }

  Communicator& comm;
  ToyModel model{kSizes};
  std::unique_ptr<DataParallel> ddp;
};

TEST(ReplicaCheckTest, NamesTheTensorTheStepAndTheRankOnAllRanks) {
  for (const int world_size : {2, 3, 5}) {
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      Rank rank(comm);
      EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = 2}}));
      const int odd_one = world_size - 1;
      for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
      if (comm.rank() == odd_one) FlipBit(rank.model, 1);
      EK_RETURN_IF_ERROR(rank.Step(3));  // After three steps nothing is compared.
      const absl::Status status = rank.Step(4);
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      EXPECT_EQ(status.message(),
                absl::StrCat("data_parallel#0: replicas differ after step 4: \"p1\" (tensor 1)",
                             world_size == 2 ? ": ranks 0 and 1 differ"
                                             : absl::StrCat(" differs on rank ", odd_one)));
      const auto failure = FailureInfoOf(status);
      if (!failure.has_value()) return absl::InternalError("no FailureInfo");
      EXPECT_EQ(failure->kind, FailureKind::kDisagreement);
      EXPECT_EQ(failure->ranks,
                world_size == 2 ? std::vector<int>({0, 1}) : std::vector<int>({odd_one}));
      EXPECT_EQ(failure->step, 4);
      // The group remains usable, and the step is compared again.
      rank.value(1)[0] = 0.5f;
      for (int step = 4; step < 8; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
      return absl::OkStatus();
    });
  }
}

TEST(ReplicaCheckTest, TheVariableIsTheDefault) {
  setenv("EVENKEEL_CHECK_REPLICAS", "3", /*replace=*/1);
  for (const int64_t every : {0, 2}) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      Rank rank(comm);
      EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = every}}));
      const int first = every == 0 ? 3 : 4;  // Compares, after three steps.
      for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
      if (comm.rank() == 0) FlipBit(rank.model, 2);
      for (int step = 3; step < first; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
      EXPECT_THAT(rank.Step(first).message(), HasSubstr("\"p2\" (tensor 2) differs on rank 0"));
      return absl::OkStatus();
    });
  }
  setenv("EVENKEEL_CHECK_REPLICAS", "-1", /*replace=*/1);
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    const absl::Status status = Rank(comm).Create({});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(),
                HasSubstr("EVENKEEL_CHECK_REPLICAS=-1 is not a number from 0 to 10000000"));
    return absl::OkStatus();
  });
  unsetenv("EVENKEEL_CHECK_REPLICAS");
}

TEST(ReplicaCheckTest, WithoutASettingNothingIsCompared) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    EK_RETURN_IF_ERROR(rank.Create({}));
    if (comm.rank() == 0) FlipBit(rank.model, 2);
    for (int step = 0; step < 5; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
    return absl::OkStatus();
  });
}

TEST(ReplicaCheckTest, EachTensorHasItsTurn) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    for (int param = 0; param < 4; ++param) {
      Rank rank(comm);
      EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = 2, .parts = 4}}));
      EK_RETURN_IF_ERROR(rank.Step(0));
      if (comm.rank() == 2) FlipBit(rank.model, param);
      int step = 1;
      absl::Status status;
      while (status.ok() && step < 20) status = rank.Step(step++);
      // Checks come after 2, 4, 6 and 8 steps, of parts 1, 2, 3 and 0.
      EXPECT_THAT(status.message(),
                  HasSubstr(absl::StrCat("after step ", param == 0 ? 8 : 2 * param, ": \"p", param,
                                         "\" (tensor ", param, ") differs on rank 2")));
    }
    return absl::OkStatus();
  });
}

TEST(ReplicaCheckTest, StepsThatAccumulateDoNotCount) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = 2}}));
    for (int step = 0; step < 2; ++step) {
      EK_RETURN_IF_ERROR(rank.Step(3 * step, StepMode::kAccumulate));
      EK_RETURN_IF_ERROR(rank.Step(3 * step + 1, StepMode::kAccumulate));
      EK_RETURN_IF_ERROR(rank.Step(3 * step + 2));
    }
    if (comm.rank() == 1) FlipBit(rank.model, 3);
    EXPECT_THAT(rank.Step(6, StepMode::kAccumulate).message(),
                HasSubstr("after step 2: \"p3\" (tensor 3) differs on rank 1"));
    return absl::OkStatus();
  });
}

TEST(ReplicaCheckTest, FrozenParametersAreComparedAndIgnoredOnesAreNot) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    ParameterSet& params = rank.model.params();
    EK_RETURN_IF_ERROR(params.Ignore(3));
    rank.value(3)[0] = static_cast<float>(comm.rank());
    EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = 1}}));
    for (int step = 0; step < 6; ++step) {
      params.SetTrainable(1, step < 2 || step > 3);
      params.SetTrainable(2, step > 1);
      EK_RETURN_IF_ERROR(rank.Step(step));
    }
    params.SetTrainable(1, false);
    if (comm.rank() == 1) FlipBit(rank.model, 1);
    EXPECT_THAT(rank.Step(6).message(), HasSubstr("\"p1\" (tensor 1) differs on rank 1"));
    return absl::OkStatus();
  });
}

// ToyModel::Forward() changes the buffer of each rank in another way.
TEST(ReplicaCheckTest, BuffersAreComparedOnlyWhereTheyAreMadeEqual) {
  for (const int64_t every : {0, 1, 3}) {
    for (const BufferSync how : {BufferSync::kBroadcast, BufferSync::kAverage}) {
      RunGroup(3, [&](Communicator& comm) -> absl::Status {
        Rank rank(comm);
        EK_RETURN_IF_ERROR(
            rank.Create({.buffers = {.how = how, .every = every}, .check_replicas = {.every = 1}},
                        rank.model.buffers()));
        for (int step = 0; step < 7; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
        return absl::OkStatus();
      });
    }
  }
}

// Two buffers of rank 1 are in the same memory by mistake, so that one has the other's values.
TEST(ReplicaCheckTest, ABufferThatIsNotWhatWasSentIsNamed) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    std::vector<float> other = {1, 2, 3};
    std::vector<TensorView> buffers = rank.model.buffers();
    buffers.push_back(comm.rank() == 1 ? buffers[0] : TensorView(absl::MakeSpan(other)));
    EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = 1}}, buffers));
    EK_RETURN_IF_ERROR(rank.Step(0));
    const std::string message(rank.Step(1).message());
    EXPECT_THAT(message, HasSubstr("after step 1: \"buffer "));
    EXPECT_THAT(message, HasSubstr("differs on rank 1"));
    return absl::OkStatus();
  });
}

// Without an optimizer in the list the weights of exhausted ranks are out of date until the end.
TEST(ReplicaCheckTest, RanksWithoutAnOptimizersStepsAreNotCompared) {
  RunGroup(3, [](Communicator& comm) -> absl::Status {
    Rank rank(comm);
    EK_RETURN_IF_ERROR(rank.Create({.check_replicas = {.every = 1}}, rank.model.buffers()));
    rank.ddp->SetOptimizerState({});
    const int steps = comm.rank() == 1 ? 2 : 6;
    for (int epoch = 0; epoch < 2; ++epoch) {
      EK_RETURN_IF_ERROR(RunJoined({rank.ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
        for (int step = 0; step < steps; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
        return absl::OkStatus();
      }));
    }
    if (comm.rank() == 2) FlipBit(rank.model, 0);
    EXPECT_THAT(rank.Step(0).message(), HasSubstr("\"p0\" (tensor 0) differs on rank 2"));
    return absl::OkStatus();
  });
}

TEST(ReplicaCheckTest, SettingsMustBeValidAndEqual) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    for (const ReplicaCheckOptions& bad :
         {ReplicaCheckOptions{.every = -1}, ReplicaCheckOptions{.every = 1, .parts = 0}}) {
      const absl::Status status = Rank(comm).Create({.check_replicas = bad});
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(status.message(), HasSubstr("check_replicas: every "));
    }
    const absl::Status status =
        Rank(comm).Create({.check_replicas = {.every = 5 + int64_t{comm.rank()}}});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("check_replicas: rank 0 has every 5 steps in 1 part; "
                                            "rank 1 has every 6 steps in 1 part"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
