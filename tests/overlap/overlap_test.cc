// Buckets must follow the order in which gradients really arrive (the story of PyTorch #72843), over every CPU backend:
// - registration order the reverse of execution order: no overlap before the rebuild, overlap after it;
// - a module that only one rank uses, and an all-to-all in the middle of backward that ranks reach at different times:
//   it never pairs with a bucket, and gradients are right from the first step on.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/gloo.h"
#include "evenkeel/comm/internal/run_group.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using Body = absl::FunctionRef<absl::Status(Communicator&)>;

struct Backend {
  std::string name;
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> (*create)(int world_size);
};

const Backend kBackends[] = {
    {"Local", [](int world_size) { return CreateLocalGroup(world_size); }},
    {"Gloo", [](int world_size) { return CreateGlooGroupInProcess(world_size); }},
};

class OverlapTest : public testing::TestWithParam<Backend> {
 protected:
  void Run(int world_size, Body body) {
    auto group = GetParam().create(world_size);
    ASSERT_TRUE(group.ok()) << group.status();
    absl::Status status = internal::RunGroup(*group, body);
    EXPECT_TRUE(status.ok()) << status;
  }
};

auto Announcer(DataParallel& ddp) {
  return [&ddp](int param) { return ddp.GradientReady(param); };
}

TEST_P(OverlapTest, ComesWithTheRebuildWhereRegistrationIsTheReverseOfExecution) {
  const std::vector<int> sizes(6, 1000);
  Run(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(sizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, {.reducer = {.caps = {Bytes{4000}}}}));
    for (int step = 0; step < 3; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      // All ranks are known to take part, so that what follows depends on the order of gradients alone.
      absl::Notification agreed;
      comm.steps().current()->OnAnswer([&](const absl::StatusOr<StepAnswer>&) { agreed.Notify(); });
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
        EXPECT_EQ(times.buckets[b].gradients_at_launch, b + 1) << "step " << step << ", bucket " << b;
      }
      for (int b = 0; b < 5; ++b) {
        EXPECT_LT(times.buckets[b].launched, times.last_gradient) << "step " << step << ", bucket " << b;
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(OverlapTest, AnAllToAllInBackwardNeverPairsWithABucket) {
  const std::vector<int> sizes = {64, 32, 64, 64};
  constexpr int kModule = 1;  // Rank 1 never uses it.
  Run(2, [&](Communicator& comm) -> absl::Status {
    const int rank = comm.rank();
    ToyModel model(sizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, {.reducer = {.caps = {Bytes{4}}}}));
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

INSTANTIATE_TEST_SUITE_P(Backends, OverlapTest, testing::ValuesIn(kBackends),
                         [](const testing::TestParamInfo<Backend>& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel
