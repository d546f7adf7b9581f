// Buckets must follow the order in which gradients really arrive (the story of PyTorch #72843):
// - registration order the reverse of execution order: no overlap before the rebuild, overlap after
//   it;
// - nothing leaves before all ranks have begun the step;
// - a module that only one rank uses, and an all-to-all in the middle of backward that ranks reach
//   at different times: it never pairs with a bucket, and gradients are right from the first step
//   on;
// - the same where ranks have unequal numbers of inputs: exhausted ranks follow the all-to-all with
//   zeros.

#include <algorithm>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using Body = absl::FunctionRef<absl::Status(Communicator&)>;

void RunAll(int world_size, Body body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

auto Announcer(DataParallel& ddp) {
  return [&ddp](int param) { return ddp.GradientReady(param); };
}

TEST(OverlapTest, ComesWithTheRebuildWhereRegistrationIsTheReverseOfExecution) {
  const std::vector<int> sizes(6, 1000);
  RunAll(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(sizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.caps = {Bytes{4000}}}}));
    for (int step = 0; step < 3; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      // All ranks are known to take part, so that what follows depends on the order of gradients
      // alone.
      absl::Notification agreed;
      StepControl::Of(comm).current()->OnAnswer(
          [&](const absl::StatusOr<StepAnswer>&) { agreed.Notify(); });
      agreed.WaitForNotification();
      for (int p = 0; p < 6; ++p) {  // The first registered is the first that is ready.
        EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), step, Announcer(*ddp)));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      const StepTimes& times = ddp->reducer().last_step();
      EXPECT_EQ(times.gradients, 6);
      if (step == 0) {  // Everything waits for the last gradient.
        EXPECT_EQ(times.buckets.size(), 1u);
        EXPECT_EQ(times.buckets[0].gradients_at_launch, 6);
        EXPECT_GE(times.buckets[0].launched, times.last_gradient);
        continue;
      }
      EXPECT_EQ(times.buckets.size(), 6u);
      for (int b = 0; b < 6; ++b) {  // Each leaves with its gradient, while backward goes on.
        EXPECT_EQ(times.buckets[b].gradients_at_launch, b + 1)
            << "step " << step << ", bucket " << b;
      }
      for (int b = 0; b < 5; ++b) {
        EXPECT_LT(times.buckets[b].launched, times.last_gradient)
            << "step " << step << ", bucket " << b;
      }
    }
    return absl::OkStatus();
  });
}

// Until then the ranks have not agreed on what they do, and the divisor is not known.
TEST(OverlapTest, NoBucketLeavesBeforeAllRanksHaveBegunTheStep) {
  constexpr int kSteps = 2;
  absl::Notification is_computed[kSteps];
  absl::Time begins[kSteps];  // When rank 1, which is late, begins a step.
  RunAll(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(std::vector<int>(6, 1000));
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.caps = {Bytes{4000}}}}));
    for (int step = 0; step < kSteps; ++step) {
      model.params().ClearGradients();
      if (comm.rank() == 1) {
        EXPECT_TRUE(is_computed[step].WaitForNotificationWithTimeout(absl::Seconds(30)));
        begins[step] = SteadyNow();
      }
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int p = 0; p < 6; ++p)
        EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), step, Announcer(*ddp)));
      if (comm.rank() == 0) is_computed[step].Notify();
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      for (const BucketTimes& bucket : ddp->reducer().last_step().buckets) {
        EXPECT_GE(bucket.launched, begins[step]) << "step " << step;
      }
    }
    return absl::OkStatus();
  });
}

TEST(OverlapTest, AnAllToAllInBackwardNeverPairsWithABucket) {
  const std::vector<int> sizes = {64, 32, 64, 64};
  constexpr int kModule = 1;  // Rank 1 never uses it.
  RunAll(2, [&](Communicator& comm) -> absl::Status {
    const int rank = comm.rank();
    ToyModel model(sizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.caps = {Bytes{4}}}}));
    EK_ASSIGN_OR_RETURN(Channel * experts, comm.OpenChannel("experts"));
    for (int step = 0; step < 4; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      // As many bytes as a bucket, so that nothing but its identity tells it apart.
      std::vector<float> sent(64), received(64);
      for (int j = 0; j < 64; ++j) sent[j] = 1000.0f * rank + j + step;
      auto exchange = [&]() -> absl::Status {
        return experts->AllToAll(absl::MakeSpan(sent), absl::MakeSpan(received)).Wait();
      };
      // Rank 1 comes to the exchange before it has any gradient, rank 0 after most of them.
      if (rank == 1) EK_RETURN_IF_ERROR(exchange());
      for (int p : {3, 2, kModule, 0}) {
        if (rank == 1 && p == kModule) continue;
        EK_RETURN_IF_ERROR(model.BackwardOf(p, rank, step, Announcer(*ddp)));
        if (rank == 0 && p == kModule) EK_RETURN_IF_ERROR(exchange());
      }
      if (rank == 1) EK_RETURN_IF_ERROR(ddp->NoGradient(kModule));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      for (int j = 0; j < 64; ++j) {
        const float expected = 1000.0f * (j / 32) + rank * 32 + j % 32 + step;
        EXPECT_EQ(received[j], expected) << "step " << step << ", element " << j;
      }
      for (int p = 0; p < 4; ++p) {
        const std::vector<float> reduced = model.Gradient(p);
        for (int j = 0; j < sizes[p]; ++j) {
          const float own = model.GradientAt(p, j, 0, step);
          const float other = p == kModule ? 0.0f : model.GradientAt(p, j, 1, step);
          EXPECT_FLOAT_EQ(reduced[j], (own + other) * 0.5f) << "step " << step << ", p" << p;
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST(OverlapTest, AnAllToAllInBackwardIsFollowedByExhaustedRanks) {
  constexpr int kWorld = 3, kPart = 16;
  const std::vector<int> sizes = {64, 48, 64};
  RunAll(kWorld, [&](Communicator& comm) -> absl::Status {
    const int rank = comm.rank();
    ToyModel model(sizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.caps = {Bytes{4}}}}));
    EK_ASSIGN_OR_RETURN(auto optimizer,
                        Optimizer::Create(comm, model.params(), Sgd{.learning_rate = 0.1}));
    for (int epoch = 0; epoch < 3; ++epoch) {
      const auto steps_of = [&](int of) {
        return std::vector<int>{3, 0, 5}[(of + epoch) % kWorld];
      };
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope& scope) -> absl::Status {
            for (int step = 0; step < steps_of(rank); ++step) {
              const auto element = [&](int from, int j) {
                return 1000.0f * from + 100.0f * step + j + 1;
              };
              // As many bytes as a bucket, so that nothing but its identity tells it apart.
              std::vector<float> sent(kWorld * kPart), received(kWorld * kPart, -1),
                  expected(kWorld * kPart);
              for (int j = 0; j < kWorld * kPart; ++j) {
                sent[j] = element(rank, j);
                const int from = j / kPart;
                expected[j] =
                    steps_of(from) > step ? element(from, rank * kPart + j % kPart) : 0.0f;
              }
              model.params().ClearGradients();
              EK_RETURN_IF_ERROR(ddp->BeginStep());
              for (int p = 2; p >= 0; --p) {  // Ranks reach it at different times of backward.
                if (p == rank)
                  EK_RETURN_IF_ERROR(
                      scope.AllToAll(absl::MakeSpan(sent), absl::MakeSpan(received)));
                EK_RETURN_IF_ERROR(model.BackwardOf(p, rank, step, Announcer(*ddp)));
              }
              EK_RETURN_IF_ERROR(ddp->FinishStep());
              EXPECT_EQ(received, expected)
                  << "epoch " << epoch << " step " << step << " rank " << rank;
              for (int p = 0; p < 3; ++p) {
                const std::vector<float> reduced = model.Gradient(p);
                for (int j = 0; j < sizes[p]; ++j) {
                  float sum = 0;
                  for (int of = 0; of < kWorld; ++of)
                    sum += steps_of(of) > step ? model.GradientAt(p, j, of, step) : 0.0f;
                  EXPECT_NEAR(reduced[j], sum / kWorld, 1e-6f) << "step " << step << ", p" << p;
                }
              }
              EK_RETURN_IF_ERROR(optimizer->Step());
            }
            return absl::OkStatus();
          }));
    }
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
