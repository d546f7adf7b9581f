// Plans the buckets of a small model, and prints them.

#include "evenkeel/bucket/plan/planner.h"

#include <cstdio>
#include <vector>

#include "absl/status/statusor.h"

int main() {
  // An embedding, two layers and their biases, in float32.
  std::vector<evenkeel::ParamSpec> params = {
      {.count = 50'000}, {.count = 4'096}, {.count = 64}, {.count = 4'096}, {.count = 64},
  };
  absl::StatusOr<evenkeel::BucketPlan> plan =
      evenkeel::PlanBuckets(params, {.caps = {evenkeel::Bytes{1024}, evenkeel::Bytes{32 << 10}}});
  if (!plan.ok()) {
    std::fprintf(stderr, "%s\n", plan.status().ToString().c_str());
    return 1;
  }
  for (const std::vector<int>& bucket : plan->buckets) {
    std::printf("bucket:");
    for (int param : bucket) std::printf(" %d", param);
    std::printf("\n");
  }
  // The first bucket closes at 1 KiB, the others at 32 KiB.
  return plan->buckets == std::vector<std::vector<int>>{{0}, {1, 2, 3}, {4}} ? 0 : 1;
}
