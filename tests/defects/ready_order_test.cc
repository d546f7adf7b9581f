// A rank without inputs has seen no gradient, and must not decide in which order buckets are made.
// Elsewhere rank 0's order is everybody's: registration order if it was empty, so that nothing
// overlaps with backward for the rest of the run.

#include <vector>

#include "absl/status/status.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kParams = 6;
constexpr int kSteps = 4;

// Runs a loop in which the first `empty` ranks have no inputs; gradients come in `order`.
void ExpectBucketsInOrder(int world, int empty, const std::vector<int>& order) {
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    ToyModel model(std::vector<int>(kParams, 100));
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.caps = {Bytes{400}}}}));
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      const int steps = comm.rank() < empty ? 0 : kSteps;
      for (int step = 0; step < steps; ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        for (const int param : order) {
          EK_RETURN_IF_ERROR(model.BackwardOf(param, comm.rank(), step,
                                              [&](int p) { return ddp->GradientReady(p); }));
        }
        EK_RETURN_IF_ERROR(ddp->FinishStep());
      }
      return absl::OkStatus();
    }));
    std::vector<int> bucket_order;
    for (const BucketInfo& bucket : ddp->buckets()) {
      bucket_order.insert(bucket_order.end(), bucket.params.begin(), bucket.params.end());
    }
    EXPECT_EQ(ddp->buckets().size(), kParams) << "rank " << comm.rank();
    EXPECT_EQ(bucket_order, order) << "rank " << comm.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ReadyOrderTest, RankZeroWithoutInputsKeepsReadyOrder) {
  ExpectBucketsInOrder(2, 1, {5, 4, 3, 2, 1, 0});
  ExpectBucketsInOrder(2, 1, {3, 5, 1, 4, 0, 2});
}

TEST(ReadyOrderTest, SeveralRanksWithoutInputsKeepReadyOrder) {
  ExpectBucketsInOrder(3, 2, {5, 4, 3, 2, 1, 0});
  ExpectBucketsInOrder(8, 7, {3, 5, 1, 4, 0, 2});
}

}  // namespace
}  // namespace evenkeel
