#include "evenkeel/join/steps/straggler_detector.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/container/inlined_vector.h"

namespace evenkeel {
namespace {

// The cost of a straggler is this many times the uncertainty that the differences of the blocks
// show. A single hiccup has a cost as large as its uncertainty.
constexpr double kSigmas = 5.5;

// Values by rank, which need no allocation in groups of up to 8 ranks.
template <typename T>
using ByRank = absl::InlinedVector<T, 8>;

// Returns each value less the lower median of the others: of two equal stragglers among three
// ranks, each is compared with the third. Ranks without a value do not count; 0 without others.
ByRank<double> ExcessOverOthers(const ByRank<std::optional<double>>& values) {
  ByRank<double> sorted;
  for (const std::optional<double>& value : values) {
    if (value.has_value()) sorted.push_back(*value);
  }
  std::sort(sorted.begin(), sorted.end());
  ByRank<double> excess(values.size());
  if (sorted.size() < 2) return excess;
  const size_t middle = (sorted.size() - 2) / 2;  // Without the value itself.
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].has_value())
      excess[i] = *values[i] - sorted[*values[i] <= sorted[middle] ? middle + 1 : middle];
  }
  return excess;
}

// Adds to `part_by_rank` each rank's part of the time between the shortest and the longest of
// `busy`.
void AddParts(ByRank<std::pair<int64_t, int>> busy, absl::Span<double> part_by_rank) {
  std::sort(busy.begin(), busy.end());
  double part = 0;
  for (size_t i = 0; i < busy.size(); ++i) {
    if (i > 0) {
      part += static_cast<double>(busy[i].first - busy[i - 1].first) /
              static_cast<double>(busy.size() - i);
    }
    part_by_rank[busy[i].second] += part;
  }
}

// Returns the cost of each rank, as a fraction of the time. Ranks are compared per time with
// inputs, which they have for different numbers of steps.
template <typename Sums>
ByRank<double> CostsOf(const Sums& sums) {
  ByRank<std::optional<double>> rates;
  for (const auto& rank : sums.ranks) {
    rates.push_back(rank.active_us == 0
                        ? std::nullopt
                        : std::optional(rank.part_us / static_cast<double>(rank.active_us)));
  }
  ByRank<double> costs = ExcessOverOthers(rates);
  for (size_t rank = 0; rank < costs.size() && sums.time_us > 0; ++rank) {
    costs[rank] *=
        static_cast<double>(sums.ranks[rank].active_us) / static_cast<double>(sums.time_us);
  }
  return costs;
}

}  // namespace

void StragglerDetector::Add(absl::Span<const RankTimes> ranks) {
  bool are_complete = true;
  ByRank<std::pair<int64_t, int>> busy;
  ByRank<int64_t> totals;
  were_exhausted_.resize(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& times = ranks[rank].times;
    are_complete = are_complete && times.has_value() != were_exhausted_[rank];
    were_exhausted_[rank] = ranks[rank].is_exhausted;
    if (!times.has_value()) continue;
    busy.emplace_back(times->all_busy_us(), static_cast<int>(rank));
    totals.push_back(times->total_us());
  }
  // Without a reduction since the last records: the beginning, or accumulation.
  if (busy.empty()) return;
  if (are_complete) {
    std::nth_element(totals.begin(), totals.begin() + totals.size() / 2, totals.end());
    const int64_t took = totals[totals.size() / 2];
    ByRank<double> parts(ranks.size());
    AddParts(std::move(busy), absl::MakeSpan(parts));
    ++now_.steps;
    now_.time_us += took;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!ranks[rank].times.has_value()) continue;
      RankSums& sums = now_.ranks[rank];
      ++sums.steps;
      sums.active_us += took;
      sums.part_us += parts[rank];
      sums.samples += ranks[rank].samples;
      sums.times += *ranks[rank].times;
    }
  }
  const bool is_full = now_.steps >= kStepsPerBlock && now_.time_us >= kLeastBlockUs;
  const bool is_long = now_.steps >= kLeastStepsPerBlock && now_.time_us >= kBlockUs;
  if (!is_full && !is_long) return;
  const int world_size = static_cast<int>(ranks.size());
  all_.Add(now_);
  recent_.push_back(std::exchange(now_, Sums(world_size)));
  if (recent_.size() > kBlocks) recent_.pop_front();
  LookForNews();
}

void StragglerDetector::Sums::Add(const Sums& other) {
  steps += other.steps;
  time_us += other.time_us;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    RankSums& sums = ranks[rank];
    const RankSums& more = other.ranks[rank];
    sums.steps += more.steps;
    sums.part_us += more.part_us;
    sums.active_us += more.active_us;
    sums.samples += more.samples;
    sums.times += more.times;
  }
}

StragglerReport StragglerDetector::ReportOf(const Sums& sums) {
  StragglerReport report{.steps = sums.steps, .time = absl::Microseconds(sums.time_us)};
  report.ranks.resize(sums.ranks.size());
  const ByRank<double> costs = CostsOf(sums);
  int64_t least_wait = std::numeric_limits<int64_t>::max();
  for (size_t rank = 0; rank < costs.size(); ++rank) {
    const RankSums& of_rank = sums.ranks[rank];
    StragglerReport::Rank& out = report.ranks[rank];
    out.rank = static_cast<int>(rank);
    out.cost = std::max(0.0, costs[rank]);
    if (sums.time_us > 0) {
      out.without_input =
          static_cast<double>(sums.time_us - of_rank.active_us) / static_cast<double>(sums.time_us);
    }
    if (of_rank.steps == 0) continue;
    out.mean = of_rank.times;
    out.mean /= of_rank.steps;
    out.samples = static_cast<double>(of_rank.samples) / static_cast<double>(of_rank.steps);
    least_wait = std::min(least_wait, out.mean.waited_us);
  }
  ByRank<double> most(costs.size());
  for (int phase = 0; phase < kStepPhases; ++phase) {
    ByRank<std::optional<double>> times(costs.size());
    for (size_t rank = 0; rank < costs.size(); ++rank) {
      if (sums.ranks[rank].steps > 0)
        times[rank] = static_cast<double>(report.ranks[rank].mean.busy_us[phase]);
    }
    const ByRank<double> excess = ExcessOverOthers(times);
    for (size_t rank = 0; rank < costs.size(); ++rank) {
      if (excess[rank] > most[rank]) report.ranks[rank].phase = static_cast<StepPhase>(phase);
      most[rank] = std::max(most[rank], excess[rank]);
    }
  }
  for (size_t rank = 0; rank < costs.size(); ++rank) {
    StragglerReport::Rank& out = report.ranks[rank];
    if (sums.ranks[rank].steps > 0)
      out.waited_for_others = absl::Microseconds(out.mean.waited_us - least_wait);
  }
  return report;
}

StragglerReport StragglerDetector::All() const {
  Sums sums = all_;
  sums.Add(now_);
  return ReportOf(sums);
}

StragglerReport StragglerDetector::ReportOfRecent() const {
  Sums sums(static_cast<int>(now_.ranks.size()));
  for (const Sums& block : recent_) sums.Add(block);
  StragglerReport report = ReportOf(sums);
  if (recent_.size() < kBlocks) return report;
  ByRank<double> squares(report.ranks.size());  // The deviations of the blocks.
  for (const Sums& block : recent_) {
    const ByRank<double> costs = CostsOf(block);
    for (size_t rank = 0; rank < costs.size(); ++rank) {
      const double deviation = costs[rank] - report.ranks[rank].cost;
      squares[rank] += deviation * deviation;
    }
  }
  for (size_t rank = 0; rank < squares.size(); ++rank) {
    StragglerReport::Rank& one = report.ranks[rank];
    const double uncertainty = std::sqrt(squares[rank] / ((kBlocks - 1) * kBlocks));
    const bool is_large =
        one.cost >= StragglerReport::kLeastCost &&
        one.cost * report.time >= StragglerReport::kLeastCostPerStep * report.steps;
    one.is_straggler = is_large && one.cost >= kSigmas * uncertainty;
  }
  return report;
}

void StragglerDetector::LookForNews() {
  recent_report_ = ReportOfRecent();
  const StragglerReport& report = recent_report_;
  reported_.resize(report.ranks.size());
  for (size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const StragglerReport::Rank& one = report.ranks[rank];
    if (one.is_straggler) {
      const uint32_t phase = uint32_t{1} << static_cast<int>(one.phase);
      has_news_ = has_news_ || (reported_[rank] & phase) == 0;
      reported_[rank] |= phase;
    } else if (one.cost < StragglerReport::kLeastCost / 2) {
      reported_[rank] = 0;  // Between the two it is neither news nor forgotten.
    }
  }
}

}  // namespace evenkeel
