#include "evenkeel/tests/balance/slept_cost.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace evenkeel {

StepCost SleptRank::Next(int64_t share, double now_ms) {
  StepCost cost = {.computing_ms = ComputingMs(share, now_ms)};
  if (!is_last_) return cost;
  cost.input_ms =
      workload_.last_input_ms + workload_.last_input_sample_ms * static_cast<double>(share);
  if (++steps_ % Workload::kEvery == 0) {
    cost.saving_ms = workload_.last_saving_ms;
    cost.outside_ms = workload_.last_outside_ms;
  }
  return cost;
}

double SleptRank::ComputingMs(int64_t share, double now_ms) {
  if (!workload_.measured_ms.empty())
    return share == 0 ? 0 : workload_.measured_ms[rank_].at(share);
  double speed = is_first_ ? workload_.first_speed : 1;
  if (is_last_ && workload_.is_slow_at(now_ms)) speed = workload_.last_speed;
  double ms = workload_.sample_ms * static_cast<double>(share) / speed;
  if (share > workload_.even) ms += workload_.second_pass_ms;
  if (!is_last_) return ms;
  ms += workload_.last_fixed_ms;
  return workload_.last_quota > 0 ? WithQuota(ms, now_ms) : ms;
}

// Returns the time until that much is computed, as the kernel divides it: once the quota of a
// period is used, the rank stands still until the next one.
double SleptRank::WithQuota(double computing_ms, double now_ms) {
  constexpr double kPeriod = Workload::kQuotaPeriodMs;
  double at = now_ms;
  while (true) {
    const double period = std::floor(at / kPeriod);
    if (period != quota_period_) quota_used_ms_ = 0;
    quota_period_ = period;
    const double end = (period + 1) * kPeriod;
    const double runs =
        std::min({computing_ms, workload_.last_quota * kPeriod - quota_used_ms_, end - at});
    quota_used_ms_ += runs;
    computing_ms -= runs;
    if (computing_ms <= 0) return at + runs - now_ms;
    at = end;
  }
}

double MeanStep(const Workload& workload, const std::vector<int64_t>& shares, double now_ms) {
  const int world_size = static_cast<int>(shares.size());
  std::vector<SleptRank> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(workload, rank, world_size);
  double at = now_ms;
  for (int step = 0; step < Workload::kEvery; ++step) {
    double longest = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const StepCost cost = ranks[rank].Next(shares[rank], at);
      longest =
          std::max(longest, cost.input_ms + cost.computing_ms + cost.saving_ms + cost.outside_ms);
    }
    at += longest;
  }
  return (at - now_ms) / Workload::kEvery;
}

namespace {

std::vector<int64_t> BestOfAll(const Workload& workload, const std::vector<int64_t>& sizes,
                               int world_size, double now_ms) {
  std::vector<int64_t> best, shares(world_size);
  double best_ms = std::numeric_limits<double>::infinity();
  const std::function<void(int, int64_t)> divide = [&](int rank, int64_t left) {
    if (rank == world_size) {
      if (left != 0) return;
      const double ms = MeanStep(workload, shares, now_ms);
      if (ms < best_ms) best = shares;
      best_ms = std::min(best_ms, ms);
      return;
    }
    for (const int64_t size : sizes) {
      shares[rank] = size;
      if (size <= left) divide(rank + 1, left - size);
    }
  };
  divide(0, workload.even * world_size);
  return best;
}

}  // namespace

std::vector<int64_t> BestShares(const Workload& workload, const std::vector<int64_t>& sizes,
                                int world_size, double now_ms) {
  if (world_size <= 4) return BestOfAll(workload, sizes, world_size, now_ms);
  Workload movable = workload;
  movable.last_saving_ms = movable.last_outside_ms = 0;
  std::vector<int64_t> shares(world_size, sizes.front());
  const auto next_cost = [&](int rank) {
    if (shares[rank] == sizes.back()) return std::numeric_limits<double>::infinity();
    std::vector<int64_t> alone(world_size);
    alone[rank] = shares[rank] + sizes[1] - sizes[0];
    return MeanStep(movable, alone, now_ms);
  };
  for (int64_t left = (workload.even - sizes.front()) * world_size; left > 0;
       left -= sizes[1] - sizes[0]) {
    int least = 0;
    for (int rank = 1; rank < world_size; ++rank) {
      if (next_cost(rank) < next_cost(least)) least = rank;
    }
    shares[least] += sizes[1] - sizes[0];
  }
  return shares;
}

}  // namespace evenkeel
