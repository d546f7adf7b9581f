// A SlicedOptimizer with the DataParallel that brings it slices, against one process that trains alone.

#include "evenkeel/zero_optim/sliced_optimizer.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

struct Way {
  SliceUpdates updates = SliceUpdates::kInStep;
  bool overlaps = false;
  bool views = false;
};
constexpr Way kWays[] = {{},
                         {.views = true},
                         {.overlaps = true},
                         {.updates = SliceUpdates::kInBackward},
                         {.updates = SliceUpdates::kInBackward, .overlaps = true, .views = true}};
std::string ToString(const Way& way) {
  return absl::StrCat(way.updates == SliceUpdates::kInBackward ? "in backward" : "in step",
                      way.overlaps ? ", overlaps" : "", way.views ? ", views" : "");
}
SlicedRankOptions OptionsFor(const Way& way, DType dtype = DType::kFloat32) {
  SlicedRankOptions options{.dtype = dtype};
  options.optimizer = {.updates = way.updates, .overlap_forward = way.overlaps};
  options.reducer.gradient_as_bucket_view = way.views;
  return options;
}

// From the first step on, and over the step in which the buckets are made anew.
TEST(SlicedOptimizerTest, EqualsTheUnshardedOneBitForBitAtAnyWorldSize) {
  const UpdateRule rules[] = {Sgd{.learning_rate = 0.1}, kMomentum, Adam{.weight_decay = 0.1}, AdamW{}};
  for (int world_size : {1, 2, 3, 5, 8}) {
    for (const Way& way : kWays) {
      for (const UpdateRule& rule : rules) {
        for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
          SCOPED_TRACE(
              absl::StrCat("world ", world_size, " ", ToString(way), " ", ToString(rule), " ", ToString(dtype)));
          RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
            EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, rule, OptionsFor(way, dtype)));
            TestModel plain_model(kSizes, dtype);
            PlainTraining plain(&plain_model, rule);
            for (int step = 0; step < 4; ++step) {
              const StepOptions options = way.updates == SliceUpdates::kInBackward
                                              ? StepOptions()
                                              : StepOptions{.grad_scale = step == 1 ? 0.3 : 1.0, .skip = step == 2};
              EK_RETURN_IF_ERROR(rank->Step(step, options));
              plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
              EK_RETURN_IF_ERROR(rank->optimizer->WaitForAll());
              EXPECT_TRUE(rank->model.Bytes() == plain_model.Bytes()) << "rank " << comm.rank() << ", step " << step;
            }
            return rank->ExpectEqual(plain_model, plain);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel
