// An optimizer by slices where steps are not all alike: buckets that stay, updates that do not
// follow, plans that change.

#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

SlicedRankOptions OptionsFor(bool updates, bool skips) {
  SlicedRankOptions options;
  options.placement = {.update_in_backward = updates};
  options.reducer.skip_unused_buckets = skips;
  return options;
}

// In some steps nobody needs the last bucket, and some parameters have a gradient on one rank only.
std::set<int> WithoutIn(int step, int rank) {
  std::set<int> without;
  if (step % 2 == 1) without = {0, 1, 2};
  if (rank != step % 3) without.insert({4, 5});
  return without;
}

TEST(SlicedReductionTest, BucketsThatStayMakeNoDifference) {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const bool updates : {kInStep, kInBackward}) {
      SCOPED_TRACE(absl::StrCat("world ", world_size, ", in backward ", updates == kInBackward));
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto skipping,
                            SlicedRank::Create(comm, kMomentum, OptionsFor(updates, true)));
        EK_ASSIGN_OR_RETURN(auto plain,
                            SlicedRank::Create(comm, kMomentum, OptionsFor(updates, false)));
        for (int step = 0; step < 6; ++step) {
          for (SlicedRank* rank : {skipping.get(), plain.get()}) {
            rank->model.params().ClearGradients();
            EK_RETURN_IF_ERROR(rank->Backward(step, StepMode::kSync, WithoutIn(step, comm.rank())));
            EK_RETURN_IF_ERROR(rank->optimizer->Step());
          }
          EXPECT_TRUE(internal::IsSame(skipping->model, plain->model))
              << "rank " << comm.rank() << ", step " << step;
        }
        EK_ASSIGN_OR_RETURN(const OptimizerState one, skipping->optimizer->Consolidate());
        EK_ASSIGN_OR_RETURN(const OptimizerState other, plain->optimizer->Consolidate());
        EXPECT_TRUE(one == other) << "rank " << comm.rank();
        return absl::OkStatus();
      });
    }
  }
}

// Gradients that are dropped are no reason to refuse those of the next step, whose buckets are
// others.
TEST(SlicedReductionTest, AStepAfterOneWithoutUpdateIsLikeAnyOther) {
  for (const int world_size : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat("world ", world_size));
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto dropping, SlicedRank::Create(comm, kMomentum));
      EK_ASSIGN_OR_RETURN(auto plain, SlicedRank::Create(comm, kMomentum));
      EK_RETURN_IF_ERROR(
          dropping->Backward(7));  // Records the order; the next step has other buckets.
      EK_RETURN_IF_ERROR(plain->Step(7, {.skip = true}));
      for (int step = 0; step < 3; ++step) {
        EK_RETURN_IF_ERROR(dropping->Step(step));
        EK_RETURN_IF_ERROR(plain->Step(step));
      }
      EXPECT_TRUE(internal::IsSame(dropping->model, plain->model)) << "rank " << comm.rank();
      return absl::OkStatus();
    });
  }
}

TEST(SlicedReductionTest, GradientsWhoseBucketsWentTwiceAreKept) {
  RunGroup(2, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, kMomentum));
    EK_ASSIGN_OR_RETURN(auto plain, SlicedRank::Create(comm, kMomentum));
    for (int step = 0; step < 3; ++step) {
      EK_RETURN_IF_ERROR(plain->Step(step));
      rank->model.params().ClearGradients();
      EK_RETURN_IF_ERROR(rank->Backward(step));
      for (const bool trained : {false, true}) {
        rank->model.params().SetTrainable(3, trained);
        rank->model.params().SetTrainable(1, trained);
        EK_RETURN_IF_ERROR(rank->ddp->RefreshTrainable());
      }
      EK_RETURN_IF_ERROR(rank->optimizer->Step());
    }
    EXPECT_TRUE(internal::IsSame(rank->model, plain->model)) << "rank " << comm.rank();
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
