#include "evenkeel/trainer/data/sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

// Returns the number of batches of all ranks together; the last one may be smaller.
int64_t GlobalBatchCount(const BatchPlan& plan) {
  return (plan.samples - plan.first + plan.batch_size - 1) / plan.batch_size;
}

int64_t FirstPosition(const BatchPlan& plan, int64_t batch) {
  return plan.first + (batch * plan.world_size + plan.rank) * plan.batch_size;
}

int64_t BatchSize(const BatchPlan& plan, int64_t batch) {
  return std::min(plan.batch_size, plan.samples - FirstPosition(plan, batch));
}

}  // namespace

absl::Status CheckBatchPlan(const BatchPlan& plan) {
  if (plan.samples < 1 || plan.samples > INT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("cannot train on ", plan.samples, " samples"));
  }
  if (plan.batch_size < 1 || plan.batch_size > INT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch size must be at least 1, got ", plan.batch_size));
  }
  if (plan.rank < 0 || plan.rank >= plan.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", plan.rank, " is out of range for ", plan.world_size, " ranks"));
  }
  if (plan.max_batches < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the limit of batches must not be negative, got ", plan.max_batches));
  }
  if (plan.first < 0 || plan.first > plan.samples) {
    return absl::InvalidArgumentError(
        absl::StrCat("position ", plan.first, " is out of range for ", plan.samples, " samples"));
  }
  if (plan.first == 0 && GlobalBatchCount(plan) < plan.world_size && plan.max_batches > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(plan.samples, " samples in batches of ", plan.batch_size, " are ",
                     GlobalBatchCount(plan), " batches, too few for ", plan.world_size, " ranks"));
  }
  return absl::OkStatus();
}

int64_t BatchCount(const BatchPlan& plan) {
  const int64_t global = GlobalBatchCount(plan);
  const int64_t available = (global - plan.rank + plan.world_size - 1) / plan.world_size;
  return std::clamp<int64_t>(available, 0, plan.max_batches);
}

int64_t SampleCount(const BatchPlan& plan) {
  const int64_t batches = BatchCount(plan);
  if (batches == 0) return 0;
  return (batches - 1) * plan.batch_size + BatchSize(plan, batches - 1);
}

int64_t SamplesDone(const BatchPlan& plan, int64_t steps) {
  const int64_t most = (GlobalBatchCount(plan) + plan.world_size - 1) /
                       plan.world_size;  // More steps have no samples.
  return std::min(plan.samples,
                  plan.first + std::min(steps, most) * plan.world_size * plan.batch_size);
}

std::span<const int32_t> BatchSamples(const BatchPlan& plan, std::span<const int32_t> order,
                                      int64_t batch) {
  return order.subspan(FirstPosition(plan, batch), BatchSize(plan, batch));
}

std::vector<int32_t> InOrder(int64_t samples) {
  std::vector<int32_t> order(samples);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::vector<int32_t> ShuffledOrder(int64_t samples, uint64_t seed, int epoch) {
  std::vector<int32_t> order = InOrder(samples);
  StableRandom random(seed, epoch);
  for (int64_t left = samples; left > 1; --left)
    std::swap(order[left - 1], order[random.Below(left)]);
  return order;
}

}  // namespace evenkeel
