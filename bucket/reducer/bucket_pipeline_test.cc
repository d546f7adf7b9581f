#include "evenkeel/bucket/reducer/bucket_pipeline.h"

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/reducer/bucket_storage.h"
#include "evenkeel/bucket/reducer/plan_in_force.h"
#include "evenkeel/bucket/reducer/reducer_core.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/base/worker_thread.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {3, 5};

// Stays in the first round of bucket 0 until `release`.
class StaysInARound : public AllReduceBuckets {
 public:
  bool HasThread() const override { return true; }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override {
    ++rounds;
    if (bucket.index == 0) {
      entered.Notify();
      release.WaitForNotification();
      has_left = true;
    }
    return AllReduceBuckets::BeginRound(bucket, round, step);
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo&, const ReductionStep&) override {
    ++reduced;
    return GradFate::kReduced;
  }

  absl::Notification entered, release;
  std::atomic<bool> has_left = false;
  std::atomic<int> rounds = 0, reduced = 0;
};

// In a group of one rank.
TEST(BucketPipelineTest, CloseWaitsForTheTurnThatTheWorkerIsIn) {
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    auto owned = std::make_unique<StaysInARound>();
    StaysInARound& reduction = *owned;
    ReducerCore core{.comm = &comm,
                     .params = &model.params(),
                     .name = "reducer",
                     .has_own_reduction = true,
                     .reduction = std::move(owned)};
    EK_ASSIGN_OR_RETURN(
        const std::unique_ptr<BucketStorage> storage,
        BucketStorage::Create({.buckets = {{0}, {1}}, .limits = std::vector<Bytes>(2)},
                              model.params(), {}, comm));
    EK_ASSIGN_OR_RETURN(const std::shared_ptr<const PlanInForce> plan,
                        MakePlanInForce(core, {.mask = model.params().mask()}, /*sparse=*/{},
                                        *storage, /*unused=*/std::nullopt));
    internal::WorkerThread worker;
    const std::shared_ptr<BucketPipeline> pipeline =
        BucketPipeline::Create({.plan = plan, .contributes = {true, true}, .worker = &worker});
    pipeline->Open(1.0);
    for (const int bucket : {0, 1}) pipeline->BucketReady(bucket, {.has_all = true});
    reduction.entered.WaitForNotification();
    std::thread closer([&] {
      pipeline->Close();
      EXPECT_TRUE(reduction.has_left);
    });
    absl::SleepFor(absl::Milliseconds(50));  // A Close() that does not wait returns meanwhile.
    reduction.release.Notify();
    closer.join();
    // No turn begins any more: not that of bucket 1, nor the next one of bucket 0.
    for (const Work& work : pipeline->works()) EK_RETURN_IF_ERROR(work.Wait());
    EXPECT_EQ(reduction.rounds, 1);
    EXPECT_EQ(reduction.reduced, 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
