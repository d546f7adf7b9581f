#include "evenkeel/bucket/reducer/plan_in_force.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/reducer/bucket_storage.h"
#include "evenkeel/bucket/reducer/reducer_core.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8};

// As many rounds for each bucket as its index says.
class UnequalRounds : public AllReduceBuckets {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return std::vector<Collective>(1 + bucket.index);
  }
  bool HasThread() const override { return true; }
};

class TwoRounds : public AllReduceBuckets {
 public:
  explicit TwoRounds(bool has_thread) : has_thread_(has_thread) {}
  std::vector<Collective> CollectivesFor(const BucketInfo&) const override {
    return std::vector<Collective>(2);
  }
  bool HasThread() const override { return has_thread_; }

 private:
  const bool has_thread_;
};

struct Request {
  std::vector<std::vector<int>> buckets = {{3, 2}, {0}};
  std::vector<std::string> delayed;  // Its parameters are in buckets of their own, the last ones.
  std::string delay_until;
  bool separate_flags = false;
  std::optional<Collective> unused;
  std::unique_ptr<BucketReduction> reduction = std::make_unique<AllReduceBuckets>();
};

using Plan = absl::StatusOr<std::shared_ptr<const PlanInForce>>;

// Makes the plan in a group of one rank.
void WithPlan(Request request, absl::FunctionRef<void(const Plan&)> check) {
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    ReducerCore core{.comm = &comm,
                     .params = &model.params(),
                     .name = "reducer",
                     .options = {.delayed = request.delayed, .delay_until = request.delay_until},
                     .has_own_reduction = true,
                     .reduction = std::move(request.reduction)};
    for (const int size : kSizes) core.specs.push_back({.count = size});
    for (const std::string& name : request.delayed)
      core.specs[model.params().Find(name)].delayed = true;
    const std::vector<Bytes> limits(request.buckets.size());
    EK_ASSIGN_OR_RETURN(
        const std::unique_ptr<BucketStorage> storage,
        BucketStorage::Create({.buckets = request.buckets, .limits = limits}, model.params(),
                              {.separate_flags = request.separate_flags}, comm));
    check(MakePlanInForce(core, {.generation = 7, .mask = model.params().mask()}, /*sparse=*/{},
                          *storage, request.unused));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PlanInForceTest, PlacesParametersInBuckets) {
  WithPlan({}, [](const Plan& made) {
    ASSERT_TRUE(made.ok()) << made.status();
    const PlanInForce& plan = **made;
    EXPECT_EQ(plan.state.generation, 7u);
    EXPECT_THAT(plan.bucket_of, ElementsAre(1, PlanInForce::kNotPlanned, 0, 0));
    EXPECT_TRUE(plan.is_planned(0));
    EXPECT_FALSE(plan.is_planned(1));
    EXPECT_EQ(plan.planned, 3);
    EXPECT_THAT(plan.announcements, ElementsAre(2, 1));
    EXPECT_EQ(plan.delayed_bucket, PlanInForce::kNone);
    EXPECT_EQ(plan.delay_until, PlanInForce::kNone);
    EXPECT_EQ(plan.used.count, 0);
    EXPECT_EQ(plan.channels.size(), 1u);
  });
}

// The agreement on unused parameters is first, the used flags are last.
TEST(PlanInForceTest, ListsTheCollectivesOfAStepInOrder) {
  const Collective unused{.kind = CollectiveKind::kAllReduce, .dtype = DType::kUint8, .count = 4};
  Request request{.separate_flags = true, .unused = unused};
  WithPlan(std::move(request), [&](const Plan& made) {
    ASSERT_TRUE(made.ok()) << made.status();
    const PlanInForce& plan = **made;
    const std::vector<Collective>& entries = plan.schedule.entries;
    EXPECT_EQ(plan.schedule.generation, 7u);
    ASSERT_EQ(entries.size(), 4u);
    EXPECT_EQ(entries[0], unused);
    for (const int bucket : {0, 1}) {
      EXPECT_EQ(entries[1 + bucket].role, Role::kBucket);
      EXPECT_EQ(entries[1 + bucket].index, bucket);
      EXPECT_EQ(entries[1 + bucket].index_count, 2);
    }
    EXPECT_EQ(entries[3].role, Role::kState);
    EXPECT_EQ(entries[3].count, 4);
    EXPECT_EQ(plan.used, entries[3]);
  });
}

TEST(PlanInForceTest, HoldsTheFirstDelayedBucketUntilTheAnnouncement) {
  Request request{.buckets = {{3}, {0}, {2}, {1}}, .delayed = {"p2", "p1"}, .delay_until = "p0"};
  WithPlan(std::move(request), [](const Plan& made) {
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ((*made)->delay_until, 0);
    EXPECT_EQ((*made)->delayed_bucket, 2);
    EXPECT_THAT((*made)->announcements, ElementsAre(1, 1, 2, 1));
  });
}

TEST(PlanInForceTest, ABucketThatHasTheAnnouncementIsNotHeldByIt) {
  Request request{.buckets = {{3}, {0}, {2, 1}}, .delayed = {"p2", "p1"}, .delay_until = "p1"};
  WithPlan(std::move(request), [](const Plan& made) {
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ((*made)->delayed_bucket, PlanInForce::kNone);
    EXPECT_THAT((*made)->announcements, ElementsAre(1, 1, 2));
  });
}

TEST(PlanInForceTest, AFrozenParameterHoldsNoBucket) {
  Request request{.buckets = {{3}, {2, 1}}, .delayed = {"p2", "p1"}, .delay_until = "p0"};
  WithPlan(std::move(request), [](const Plan& made) {
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ((*made)->delayed_bucket, PlanInForce::kNone);
    EXPECT_THAT((*made)->announcements, ElementsAre(1, 2));
  });
}

TEST(PlanInForceTest, RefusesCollectivesThatDifferBetweenBuckets) {
  WithPlan({.reduction = std::make_unique<UnequalRounds>()}, [](const Plan& made) {
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(made.status().message()),
                HasSubstr("the reduction has for bucket 1 2 collectives, bucket 0 1"));
  });
}

TEST(PlanInForceTest, ManyRoundsNeedAThread) {
  WithPlan({.reduction = std::make_unique<TwoRounds>(/*has_thread=*/true)}, [](const Plan& made) {
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ((*made)->channels.size(), 2u);
    EXPECT_EQ((*made)->buckets[1].rounds.size(), 2u);
  });
  WithPlan({.reduction = std::make_unique<TwoRounds>(/*has_thread=*/false)}, [](const Plan& made) {
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  });
}

}  // namespace
}  // namespace evenkeel
