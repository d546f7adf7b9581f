#include "evenkeel/bucket/plan/tuner.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/cost_model.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;

constexpr int64_t kMib = int64_t{1} << 20;

std::vector<int> Order(int size) {
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

CapChoice Choose(std::span<const ParamSpec> specs, std::span<const int64_t> ready,
                 const LinkCost& link, PlanOptions now = {}) {
  absl::StatusOr<CapChoice> choice =
      ChooseCaps(specs, Order(static_cast<int>(specs.size())), now, ready, link);
  EXPECT_TRUE(choice.ok()) << choice.status();
  return choice.value_or(CapChoice());
}

BucketPlan PlanOf(std::span<const ParamSpec> specs, const CapChoice& choice) {
  absl::StatusOr<BucketPlan> plan =
      PlanBuckets(specs, {.caps = choice.caps,
                          .order = Order(static_cast<int>(specs.size())),
                          .cap_order = choice.cap_order});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.value_or(BucketPlan());
}

// Four gradients of 1 MiB, one every 10 us; a reduction takes 2 us and 1 us per MiB: each alone,
// all but the last are hidden.
TEST(ChooseCapsTest, GradientsThatComeSlowlyTravelAlone) {
  const std::vector<ParamSpec> specs(4, {.count = kMib / 4});
  const std::vector<int64_t> ready = {10'000, 20'000, 30'000, 40'000};
  const CapChoice choice = Choose(specs, ready, {.latency_ns = 2000, .ns_per_mib = 1000});
  EXPECT_EQ(choice.before.exposed_ns, 5000);  // {0}, {1, 2, 3}
  EXPECT_EQ(choice.after.exposed_ns, 3000);
  EXPECT_EQ(PlanOf(specs, choice).buckets.back(), std::vector<int>{3});
}

// Latency is all there is to pay, and all gradients come at once.
TEST(ChooseCapsTest, WhereLatencyIsAllThereIsEverythingTravelsTogether) {
  const std::vector<ParamSpec> specs(40, {.count = kMib / 4});
  const std::vector<int64_t> ready(40, 1000);
  const CapChoice choice = Choose(specs, ready, {.latency_ns = 50'000});
  EXPECT_EQ(PlanOf(specs, choice).buckets.size(), 1u);
  EXPECT_EQ(choice.after.exposed_ns, 50'000);
}

// The last gradients come far apart and are small, the first ones at once and large: neither caps
// of one size are good, nor a small first bucket.
TEST(ChooseCapsTest, FindsPartitionsThatNoPairOfCapsGives) {
  std::vector<ParamSpec> specs(12, {.count = 8 * kMib / 4});
  specs.insert(specs.end(), 6, {.count = 25'600});
  std::vector<int64_t> ready(12, 10'000);
  for (int i = 1; i <= 6; ++i) ready.push_back(10'000 + i * 400'000);
  const LinkCost link{.latency_ns = 20'000, .ns_per_mib = 20'000};
  const CapChoice choice = Choose(specs, ready, link);
  EXPECT_EQ(choice.after.exposed_ns, link.ReductionNs(4 * 25'600));
  EXPECT_GT(choice.caps.size(), 2u);
  EXPECT_GT(choice.before.exposed_ns, 5 * choice.after.exposed_ns);
}

TEST(ChooseCapsTest, CapsInUseStayUnlessOthersAreClearlyBetter) {
  const std::vector<ParamSpec> specs(6, {.count = kMib / 4});
  const std::vector<int64_t> ready = {1, 2, 3, 4, 5, 6};
  const PlanOptions now{.caps = {Bytes{3 * kMib}}};
  const CapChoice choice = Choose(specs, ready, {.latency_ns = 10, .ns_per_mib = 1'000'000}, now);
  EXPECT_EQ(choice.caps, now.caps);
  EXPECT_EQ(choice.before.exposed_ns, choice.after.exposed_ns);
}

TEST(ChooseCapsTest, OtherTypesWalkThroughTheSameCaps) {
  std::vector<ParamSpec> specs(8, {.count = kMib / 4});
  for (int i : {1, 4, 6}) specs[i] = {.count = 10, .dtype = DType::kFloat64};
  specs[5].sparse = true;
  const std::vector<int64_t> ready = {1'000,   2'000,   300'000, 310'000,
                                      500'000, 510'000, 700'000, 710'000};
  const LinkCost link{.latency_ns = 1000, .ns_per_mib = 50'000};
  const CapChoice choice = Choose(specs, ready, link);
  EXPECT_LE(choice.after.exposed_ns, choice.before.exposed_ns);
  size_t planned = 0;
  for (const std::vector<int>& bucket : PlanOf(specs, choice).buckets) planned += bucket.size();
  EXPECT_EQ(planned, specs.size());
}

TEST(ChooseCapsTest, ManyParametersAreTakenTogether) {
  const std::vector<ParamSpec> specs(20'000, {.count = 1000});
  std::vector<int64_t> ready(specs.size());
  std::iota(ready.begin(), ready.end(), 0);
  for (int64_t& ns : ready) ns *= 1000;
  const CapChoice choice = Choose(specs, ready, {.latency_ns = 300'000, .ns_per_mib = 150'000});
  EXPECT_LT(choice.after.exposed_ns, choice.before.exposed_ns / 2);
}

TEST(ChooseCapsTest, NothingToPlanKeepsTheCaps) {
  const std::vector<ParamSpec> specs(2, {.count = 1});
  const absl::StatusOr<CapChoice> choice = ChooseCaps(specs, {}, {}, std::vector<int64_t>(2), {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_THAT(choice->caps, ElementsAre(kDefaultFirstCap, kDefaultCap));
  EXPECT_EQ(ChooseCaps(specs, Order(2), {}, std::vector<int64_t>(3), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Against every contiguous partition there is.
class BestPartitionTest : public testing::TestWithParam<uint32_t> {};

TEST_P(BestPartitionTest, NoPartitionIsMoreThanAFiftiethBetter) {
  std::mt19937 random(GetParam());
  const int size = 1 + static_cast<int>(random() % 10);
  std::vector<ParamSpec> specs;
  std::vector<int64_t> ready;
  int64_t now = 0;
  for (int i = 0; i < size; ++i) {
    specs.push_back({.count = static_cast<int64_t>(1 + random() % 4'000'000)});
    ready.push_back(now += static_cast<int64_t>(random() % 2'000'000));
  }
  const LinkCost link{.latency_ns = static_cast<int64_t>(random() % 500'000),
                      .ns_per_mib = static_cast<int64_t>(random() % 300'000)};
  int64_t best = std::numeric_limits<int64_t>::max();
  for (uint32_t cuts = 0; cuts < 1u << (size - 1); ++cuts) {
    BucketPlan plan;
    for (int i = 0; i < size; ++i) {
      if (i == 0 || ((cuts >> (i - 1)) & 1) != 0) plan.buckets.emplace_back();
      plan.buckets.back().push_back(i);
    }
    best = std::min(best, Predict(plan, specs, ready, link).exposed_ns);
  }
  const CapChoice choice = Choose(specs, ready, link);
  EXPECT_GE(choice.after.exposed_ns, best);
  EXPECT_LE(choice.after.exposed_ns - choice.after.exposed_ns / 50, best);
  EXPECT_EQ(Predict(PlanOf(specs, choice), specs, ready, link).exposed_ns, choice.after.exposed_ns);
}

INSTANTIATE_TEST_SUITE_P(Seeds, BestPartitionTest,
                         testing::Range(0u, 200u));  // The parameter is the seed.

TEST(MedianOfTest, AProfileHasTheMediansOfItsSteps) {
  const std::vector<StepProfile> steps = {{.ready_ns = {900, 20}, .bucket_ns = {5}, .launch_ns = 7},
                                          {.ready_ns = {10, 40}, .bucket_ns = {6}, .launch_ns = 8},
                                          {.ready_ns = {12, 30}, .bucket_ns = {7}, .launch_ns = 9}};
  EXPECT_EQ(MedianOf(steps), (StepProfile{.ready_ns = {12, 30}, .bucket_ns = {6}, .launch_ns = 8}));
}

TEST(CombinedTest, TheSlowestRankHoldsUpAndTheLastOneSeesTheLink) {
  const std::vector<StepProfile> ranks = {
      {.ready_ns = {10, 50}, .bucket_ns = {900, 30}, .launch_ns = 3},
      {.ready_ns = {20, 40}, .bucket_ns = {70, 80}, .launch_ns = 2}};
  EXPECT_EQ(Combined(ranks),
            (StepProfile{.ready_ns = {20, 50}, .bucket_ns = {70, 30}, .launch_ns = 3}));
}

TEST(StepProfileTest, SurvivesTheWireAndRefusesEverythingElse) {
  const StepProfile profile{.ready_ns = {1, -2, 3}, .bucket_ns = {4, 5}, .launch_ns = 6};
  const std::string bytes = profile.Serialize();
  const absl::StatusOr<StepProfile> parsed = StepProfile::Parse(bytes, 3, 2);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, profile);
  EXPECT_FALSE(StepProfile::Parse(bytes, 2, 2).ok());
  EXPECT_FALSE(StepProfile::Parse(bytes, 3, 3).ok());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(StepProfile::Parse(bytes.substr(0, size), 3, 2).ok()) << size;
  }
  EXPECT_FALSE(StepProfile::Parse(bytes + "x", 3, 2).ok());
}

}  // namespace
}  // namespace evenkeel
