// A parameter that no active rank uses has no gradient, whatever ranks that became exhausted used
// before: its value, momentum and count of updates stay. Elsewhere an exhausted rank goes on saying
// that it uses what it last did (or what lay in its memory, if it never ran), so that the parameter
// gets a gradient of zeros, and decay and momentum move it.

#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kParams = 5;
constexpr int kUnused = 1;  // From the third step on.
constexpr int kUsedSteps = 2, kSteps = 6;

// The highest rank has all inputs, the others have two, and rank 0 has none if there are more than
// two ranks.
int StepsOf(const Communicator& comm) {
  if (comm.rank() + 1 == comm.world_size()) return kSteps;
  return comm.rank() == 0 && comm.world_size() > 2 ? 0 : kUsedSteps;
}

class UnusedJoinTest : public testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(UnusedJoinTest, WhatNoActiveRankUsesIsLeftAloneByDryRanksToo) {
  const auto [world, views, skips] = GetParam();
  DataParallelOptions options;
  options.reducer = {.caps = {Bytes{24}},
                     .gradient_as_bucket_view = views,
                     .find_unused = true,
                     .skip_unused_buckets = skips};
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    ToyModel model({3, 7, 1, 5, 2});
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options));
    EK_ASSIGN_OR_RETURN(
        auto optimizer,
        Optimizer::Create(comm, model.params(), Sgd{.momentum = 0.9, .weight_decay = 0.1}));
    std::vector<float> value_then;
    EK_RETURN_IF_ERROR(RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < StepsOf(comm); ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        const bool is_used = step < kUsedSteps;
        EK_RETURN_IF_ERROR(
            ddp->MarkUnused(is_used ? std::vector<int>{} : std::vector<int>{kUnused}));
        for (int p = kParams - 1; p >= 0; --p) {
          if (p == kUnused && !is_used) continue;
          EK_RETURN_IF_ERROR(model.BackwardOf(
              p, comm.rank(), step, [&](int param) { return ddp->GradientReady(param); }));
        }
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        EXPECT_EQ(model.params().grad_state(kUnused),
                  is_used ? GradState::kReduced : GradState::kNone)
            << "rank " << comm.rank() << ", step " << step;
        EK_RETURN_IF_ERROR(optimizer->Step());
        if (step + 1 == kUsedSteps) value_then = model.values()[kUnused];
      }
      return absl::OkStatus();
    }));
    const OptimizerState state = optimizer->state();
    for (int p = 0; p < kParams; ++p) {
      EXPECT_EQ(state.params.at(p).step, p == kUnused ? kUsedSteps : kSteps)
          << "rank " << comm.rank() << ", p" << p;
    }
    if (!value_then.empty()) {
      EXPECT_EQ(model.values()[kUnused], value_then) << "rank " << comm.rank();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnusedJoinTest,
                         testing::Combine(testing::Values(2, 3, 8), testing::Bool(),
                                          testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<int, bool, bool>>& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param) ? "Views" : "Copies",
                                               std::get<2>(info.param) ? "Skips" : "");
                         });

}  // namespace
}  // namespace evenkeel
