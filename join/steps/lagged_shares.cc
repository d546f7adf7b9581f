#include "evenkeel/join/steps/lagged_shares.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace evenkeel {

LaggedShares::LaggedShares(Options options)
    : lag_(options.lag),
      steps_before_(options.steps_before),
      planner_(std::move(options.limits)),
      shares_(planner_.shares()) {}

// The first step of all has no time, since no reduction came before it.
int64_t LaggedShares::LastNeeded(int64_t step) const {
  const int64_t last = std::max(step - lag_, restarted_at_ - 2);
  return last > std::max<int64_t>(steps_before_, 1) ? last : 0;
}

void LaggedShares::Add(int64_t step, std::vector<PhaseTimes> times) {
  newest_ = step;
  if (step > steps_before_) times_.emplace_back(step, std::move(times));
}

// Shows the planner the times up to the step `last`.
void LaggedShares::Use(int64_t last) {
  std::vector<SharePlanner::RankInterval> ranks(planner_.shares().size());
  for (; !times_.empty() && times_.front().first <= last; times_.pop_front()) {
    const auto& [step, times] = times_.front();
    const std::vector<int64_t> samples = SamplesOf(step);
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      ranks[rank] = {.times = times[rank], .samples = samples.empty() ? 0 : samples[rank]};
    planner_.Add(ranks);
    samples_.erase(samples_.begin(), samples_.upper_bound(step));
  }
}

std::vector<int64_t> LaggedShares::Divide(int64_t step, int64_t samples) {
  if (step != step_) {
    Use(LastNeeded(step));
    shares_ = planner_.shares();
    step_ = step;
  }
  std::vector<int64_t> boundaries = BoundariesOf(shares_, samples);
  if (step == restarted_at_) return boundaries;
  std::vector<int64_t>& counts = samples_[step];
  counts.resize(shares_.size());
  for (size_t rank = 0; rank < counts.size(); ++rank)
    counts[rank] += boundaries[rank + 1] - boundaries[rank];
  return boundaries;
}

void LaggedShares::RestartAt(int64_t step) {
  samples_.erase(samples_.lower_bound(step), samples_.end());
  restarted_at_ = step;
  step_ = 0;
}

std::vector<int64_t> LaggedShares::SamplesOf(int64_t step) const {
  const auto found = samples_.find(step);
  return found == samples_.end() ? std::vector<int64_t>() : found->second;
}

}  // namespace evenkeel
