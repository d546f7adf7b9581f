// The code in README.md, so that it stays true.

#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/planner.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(ReadmeTest, PlansASmallModel) {
  std::vector<ParamSpec> params = {{.count = 50'000}, {.count = 64}, {.count = 640}};
  absl::StatusOr<BucketPlan> plan =
      PlanBuckets(params, {.caps = {kDefaultFirstCap, kDefaultCap}, .order = {2, 1, 0}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (std::vector<std::vector<int>>{{2, 1, 0}}));
}

}  // namespace
}  // namespace evenkeel
