// An optimizer in slices clips by the norm of all slices, and leaves out a step with a gradient
// that is not finite.

#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

// Under uneven inputs, with a learning rate that changes. The slices' sums run in another order
// than the test's, by so little that no float32 element is scaled differently.
TEST(SlicedClipTest, WithAScheduleUnderUnevenInputsEqualsOneRank) {
  for (const std::vector<int>& inputs :
       std::vector<std::vector<int>>{{4}, {4, 4}, {1, 4}, {3, 0, 4}, {2, 4, 1, 0, 3}}) {
    for (const double p : {1.0, 2.0, 3.0, kInfinityNorm}) {
      SCOPED_TRACE(absl::StrCat(testing::PrintToString(inputs), " norm ", p));
      const int world_size = static_cast<int>(inputs.size());
      const auto active_in = [&](int step) {
        std::vector<int> active;
        for (int rank = 0; rank < world_size; ++rank) {
          if (step < inputs[rank]) active.push_back(rank);
        }
        return active;
      };
      const StepOptions options = {.clip = ClipOptions{.max_norm = 0.05, .norm = p}};
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
        EK_RETURN_IF_ERROR(RunJoined(
            {rank->ddp.get(), rank->optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
              for (int step = 0; step < inputs[comm.rank()]; ++step) {
                EK_RETURN_IF_ERROR(rank->optimizer->SetLearningRate(0.1 / (1 + step)));
                EK_RETURN_IF_ERROR(rank->Step(step, options));
              }
              return absl::OkStatus();
            }));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, AdamW{});
        for (int step = 0; !active_in(step).empty(); ++step) {
          EK_RETURN_IF_ERROR(plain.groups().SetLearningRate(0.1 / (1 + step)));
          plain.Step(active_in(step), step, 1.0 / world_size, options);
        }
        const double bound = TheTestBackend().adds_in_rank_order ? 1e-12 : 1e-5;
        EXPECT_NEAR(rank->optimizer->last_check()->norm, plain.norm(), bound * plain.norm());
        return ExpectEqual(*rank, plain_model, plain.state());
      });
    }
  }
}

TEST(SlicedClipTest, AGradientThatIsNotFiniteOnOneRankIsSkippedByAll) {
  for (const int bad_param : {0, 1, 2, 6}) {
    RunGroup(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, AdamW{});
      for (int step = 0; step < 4; ++step) {
        // An infinite weight on one rank for a moment makes its gradient infinite, too.
        float& weight = rank->model.params()[bad_param].value.as<float>()[0];
        const float kept = weight;
        const bool is_bad = step == 2;
        if (is_bad && comm.rank() == 1) weight = INFINITY;
        rank->model.params().ClearGradients();
        EK_RETURN_IF_ERROR(rank->Backward(step));
        weight = kept;
        EK_RETURN_IF_ERROR(rank->optimizer->Step({.skip_nonfinite = true}));
        EXPECT_EQ(rank->optimizer->last_check()->is_skipped, is_bad);
        if (!is_bad) plain.Step(Ranks(3), step, 1.0 / 3);
      }
      return ExpectEqual(*rank, plain_model, plain.state());
    });
  }
}

}  // namespace
}  // namespace evenkeel
