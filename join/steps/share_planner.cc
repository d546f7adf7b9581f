#include "evenkeel/join/steps/share_planner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/join/steps/internal/share_cost.h"
#include "evenkeel/join/steps/step_agreement.h"

namespace evenkeel {
namespace {

using News = CostCurve::News;

constexpr int kBatches = CostMeter::kBatches;
constexpr int64_t kIntervalsPerBatch = SharePlanner::kLeastIntervals / kBatches;

// A cost has changed if it differs by more than its noise and by this part of the rank's time.
constexpr double kLeastChange = 0.04;
// A change of shares is made for this part of the step.
constexpr double kLeastGain = 0.02;
// Shares that are this close to the best ones are as good.
constexpr double kTolerance = 0.01;
// An interval in which a rank saves for a larger part of it is dropped. Programs mark the phase in
// each step, and save in few.
constexpr double kMostSaving = 0.02;
// A trial without a clear result ends after this number of windows.
constexpr int kLongestTrial = 8;
constexpr int64_t kMostPatience = 4096;
// Later than kPatience windows after the beginning or a change of speed, attempts to find better
// shares are this number of intervals apart.
constexpr int64_t kIntervalsBetweenAttempts = 100;

// Shares as indices of sizes, by rank.
using Places = std::vector<int>;
using CostTable = std::vector<std::vector<double>>;  // By rank and size; none falls with the size.

// Returns the logarithm of the smallest power of two from `ranks` on. std::log() may differ in the
// last bit between processors, even with the same build; sqrt() is exact.
double LogOf(int ranks) { return 0.6931 * std::bit_width(static_cast<uint32_t>(ranks - 1)); }

double LongestOf(const CostTable& costs, const Places& places) {
  double longest = 0;
  for (size_t rank = 0; rank < places.size(); ++rank)
    longest = std::max(longest, costs[rank][places[rank]]);
  return longest;
}

// Adds `quanta` to `places`, each where the cost becomes the least. There is room for them.
void Fill(const CostTable& costs, int64_t quanta, Places& places) {
  using Next = std::pair<double, size_t>;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> nexts;
  const auto push = [&](size_t rank) {
    const size_t next = static_cast<size_t>(places[rank]) + 1;
    if (next < costs[rank].size()) nexts.emplace(costs[rank][next], rank);
  };
  for (size_t rank = 0; rank < places.size(); ++rank) push(rank);
  for (; quanta > 0; --quanta) {
    const size_t rank = nexts.top().second;
    nexts.pop();
    ++places[rank];
    push(rank);
  }
}

// Returns places whose longest cost is the least one, up to kTolerance, with few moves from
// `places`.
Places BestPlaces(const CostTable& costs, const Places& places) {
  Places best(places.size());
  Fill(costs, std::accumulate(places.begin(), places.end(), int64_t{0}), best);
  const double enough = (1 + kTolerance) * LongestOf(costs, best);
  Places result = places;
  int64_t moved = 0;
  for (size_t rank = 0; rank < places.size(); ++rank) {
    for (; result[rank] > 0 && costs[rank][result[rank]] > enough; ++moved) --result[rank];
  }
  Fill(costs, moved, result);
  return result;
}

}  // namespace

int64_t DefaultQuantum(int64_t quantum, int64_t batch, int world_size) {
  return quantum != 0 ? quantum : std::max<int64_t>(1, batch / world_size / 8);
}

RankLimits RankLimits::WithDefaults(int64_t quantum, int64_t even) const {
  constexpr int64_t kMostSteps = SharePlanner::kMostSizes - 1;
  const int64_t all_below = (even - std::min(quantum, even)) / quantum, all_above = even / quantum;
  const auto room_beside = [](int64_t steps) { return std::max<int64_t>(kMostSteps - steps, 0); };
  RankLimits limits = *this;
  if (limits.most == 0) {
    const int64_t room = least == 0 ? (kMostSteps + 1) / 2 : room_beside((even - least) / quantum);
    limits.most = even + quantum * std::min(all_above, room);
  }
  if (limits.least == 0) {
    const int64_t room = room_beside((limits.most - even) / quantum);
    limits.least = even - quantum * std::min(all_below, room);
  }
  return limits;
}

int64_t ShareLimits::even(int rank) const {
  return batch / world_size() + (rank < batch % world_size() ? 1 : 0);
}

std::vector<int64_t> ShareLimits::SizesOf(int rank) const {
  std::vector<int64_t> sizes;
  for (int64_t size = even(rank) - (even(rank) - least[rank]) / quantum * quantum;
       size <= most[rank]; size += quantum) {
    sizes.push_back(size);
  }
  return sizes;
}

absl::Status Check(const ShareLimits& limits) {
  const int world_size = limits.world_size();
  if (world_size < 1 || limits.most.size() != limits.least.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("shares need a least and a most share for each rank, but have ",
                     limits.least.size(), " and ", limits.most.size(), " of them"));
  }
  if (limits.batch < world_size || limits.batch > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("a global batch of ", limits.batch,
                                                   " samples is not between ", world_size,
                                                   ", a sample for each rank, and 2^31 - 1"));
  }
  if (limits.quantum < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the quantum of shares is ", limits.quantum, ", but has to be at least 1"));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    const int64_t even = limits.even(rank);
    const int64_t least = limits.least[rank];
    const int64_t most = limits.most[rank];
    if (least < 1 || least > even || most < even) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " has shares from ", least, " to ", most,
                       " samples; they have to be at least 1 and to contain its even share, ", even,
                       " of ", limits.batch));
    }
    const int64_t sizes = 1 + (even - least) / limits.quantum + (most - even) / limits.quantum;
    if (sizes > SharePlanner::kMostSizes) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " has ", sizes, " sizes of shares from ", least, " to ", most,
                       " samples, but at most ", SharePlanner::kMostSizes,
                       " are possible: raise the quantum, ", limits.quantum));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> BoundariesOf(absl::Span<const int64_t> shares, int64_t samples) {
  const int64_t batch = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  std::vector<int64_t> boundaries = {0};
  int64_t end = 0;
  for (int64_t share : shares) {
    end += share;
    boundaries.push_back(samples * end / batch);
  }
  return boundaries;
}

std::string ShareNews::Take(absl::Span<const int64_t> shares) {
  bool is_news = false;
  for (size_t rank = 0; rank < shares.size(); ++rank)
    is_news = is_news || 10 * std::abs(shares[rank] - reported_[rank]) >= reported_[rank];
  if (!is_news) return "";
  const std::string before = TextOfCounts(reported_);
  reported_.assign(shares.begin(), shares.end());
  return absl::StrCat("ranks compute ", TextOfCounts(reported_), " of ",
                      std::accumulate(shares.begin(), shares.end(), int64_t{0}), " samples (",
                      before, " before)");
}

class SharePlanner::Impl {
 public:
  explicit Impl(ShareLimits limits);

  void Add(absl::Span<const RankInterval> ranks);

  const ShareLimits limits;
  std::vector<int64_t> shares;
  int64_t changes = 0;
  bool drops_next = false;

 private:
  struct Rank {
    std::vector<int64_t> sizes;
    std::vector<bool> has_had;  // By size.
    std::array<CostMeter, 2> meters;
    // Computing, and the rest that counts: input and the optimizer.
    std::array<CostCurve, 2> curves;
  };
  // Shares that a change has left, while it is on trial.
  struct Trial {
    Places before;
    CostEstimate step_before;
    double gain = 0;  // The model promises it.
  };

  int64_t PassesOf(absl::Span<const RankInterval> ranks) const;
  bool TakeNewSizes();
  void EndWindow();
  News AddToCurves();
  bool HasFailed();
  void Decide();
  void GoOnOrBack(const CostTable& costs, const Places& best);
  void MoveTo(Places places);

  // How many standard errors are no noise: more of them where more ranks can be the longest.
  const double sigmas_;
  std::vector<Rank> ranks_;
  Places places_;

  int64_t added_ = 0;  // Intervals, with the dropped ones.
  int64_t window_ = 0;
  int batch_ = 0;  // The current one of the window.
  CostMeter::Counts intervals_ = {};
  absl::Duration batch_took_;
  CostMeter step_meter_;  // The longest time of the ranks, without the reduction.

  CostEstimate step_;  // At the current shares.
  std::optional<Trial> trial_;
  int64_t learns_until_ = kPatience;
  int64_t patience_ = kPatience;
  int64_t next_change_ = 0;   // The window before which there is none.
  int64_t next_attempt_ = 0;  // In intervals; a change that is taken back is none.
};

SharePlanner::Impl::Impl(ShareLimits the_limits)
    : limits(std::move(the_limits)), sigmas_(3.5 + std::sqrt(2 * LogOf(limits.world_size()))) {
  for (int rank = 0; rank < limits.world_size(); ++rank) {
    const std::vector<int64_t> sizes = limits.SizesOf(rank);
    ranks_.push_back({.sizes = sizes,
                      .has_had = std::vector<bool>(sizes.size()),
                      .curves = {CostCurve(sizes, true), CostCurve(sizes, false)}});
    shares.push_back(limits.even(rank));
    places_.push_back(static_cast<int>((shares.back() - sizes.front()) / limits.quantum));
  }
}

// Returns how many batches of the current shares the interval has; 0: it has others.
int64_t SharePlanner::Impl::PassesOf(absl::Span<const RankInterval> ranks) const {
  const int64_t passes = ranks[0].samples / shares[0];
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].times.has_value() || ranks[rank].samples != passes * shares[rank]) return 0;
  }
  return passes;
}

// Returns whether a rank has its size for the first time.
bool SharePlanner::Impl::TakeNewSizes() {
  bool is_new = false;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    is_new = is_new || !ranks_[rank].has_had[places_[rank]];
    ranks_[rank].has_had[places_[rank]] = true;
  }
  return is_new;
}

void SharePlanner::Impl::Add(absl::Span<const RankInterval> ranks) {
  ++added_;
  const bool is_dropped = std::exchange(drops_next, false);
  const int64_t passes = PassesOf(ranks);
  if (passes == 0 || TakeNewSizes() || is_dropped) return;
  int64_t took_us = 0;
  for (const RankInterval& rank : ranks) {
    const int64_t total_us = rank.times->total_us();
    if (rank.times->busy(StepPhase::kSaving) > kMostSaving * static_cast<double>(total_us)) return;
    took_us = std::max(took_us, total_us);
  }
  double longest = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const PhaseTimes& times = *ranks[rank].times;
    const auto per_pass = [&](StepPhase a, StepPhase b) {
      return static_cast<double>(times.busy(a) + times.busy(b)) / static_cast<double>(passes);
    };
    const double computing = per_pass(StepPhase::kForward, StepPhase::kBackward);
    const double rest = per_pass(StepPhase::kInput, StepPhase::kOptimizer);
    ranks_[rank].meters[0].Add(batch_, computing);
    ranks_[rank].meters[1].Add(batch_, rest);
    longest = std::max(longest, computing + rest);
  }
  step_meter_.Add(batch_, longest);
  batch_took_ += absl::Microseconds(took_us);
  if (++intervals_[batch_] < kIntervalsPerBatch || batch_took_ * kBatches < kLeastWindow) return;
  batch_took_ = absl::ZeroDuration();
  if (++batch_ == kBatches) EndWindow();
}

void SharePlanner::Impl::EndWindow() {
  ++window_;
  const News news = AddToCurves();
  const MeasuredCost step = step_meter_.Take(intervals_);
  batch_ = 0;
  intervals_ = {};
  if (news == News::kChanged) {
    step_ = {};
    trial_.reset();
    learns_until_ = window_ + kPatience;
    patience_ = kPatience;
    next_change_ = 0;
  }
  if (news != News::kDoubt) step_.Add(step, window_);
  if (window_ >= next_change_) Decide();
}

// Returns the news of all ranks: a change, else a doubt.
News SharePlanner::Impl::AddToCurves() {
  std::vector<std::array<MeasuredCost, 2>> measured(ranks_.size());
  std::array<double, 2> mean_error2 = {};
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (int i = 0; i < 2; ++i) {
      measured[rank][i] = ranks_[rank].meters[i].Take(intervals_);
      mean_error2[i] += measured[rank][i].error2 / static_cast<double>(ranks_.size());
    }
  }
  News news = News::kNone;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const double mean = measured[rank][0].mean + measured[rank][1].mean;
    const CostCurve::Noise noise = {.least = kLeastChange * mean, .sigmas = sigmas_};
    for (int i = 0; i < 2; ++i) {
      // Few batches can be equal by chance, but not those of all ranks.
      measured[rank][i].error2 = std::max(measured[rank][i].error2, mean_error2[i]);
      news = std::max(news,
                      ranks_[rank].curves[i].Add(places_[rank], measured[rank][i], window_, noise));
    }
  }
  return news;
}

// Returns whether the last change did not pay. Ends its trial if it did, or if noise hides it.
bool SharePlanner::Impl::HasFailed() {
  if (!trial_.has_value() || step_.windows == 0) return false;
  const double gain = trial_->step_before.mean - step_.mean;
  const double noise = 2 * std::sqrt(trial_->step_before.error2() + step_.error2());
  const bool has_paid = gain >= kLeastGain / 2 * step_.mean;
  if (!has_paid && gain + noise < trial_->gain) return true;
  if ((has_paid && gain > noise) || step_.windows == kLongestTrial) trial_.reset();
  return false;
}

void SharePlanner::Impl::Decide() {
  CostTable costs(ranks_.size());
  double mean_error2 = 0;
  size_t longest = 0;
  const auto error2 = [&](size_t rank) {
    return ranks_[rank].curves[0].error2(places_[rank]) +
           ranks_[rank].curves[1].error2(places_[rank]);
  };
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (CostCurve& curve : ranks_[rank].curves) curve.Forget(window_ - patience_, places_[rank]);
    costs[rank] = ranks_[rank].curves[0].Costs();
    const std::vector<double> rest = ranks_[rank].curves[1].Costs();
    for (size_t i = 0; i < rest.size(); ++i) costs[rank][i] += rest[i];
    mean_error2 += error2(rank) / static_cast<double>(ranks_.size());
    if (costs[rank][places_[rank]] > costs[longest][places_[longest]]) longest = rank;
  }
  const Places best = BestPlaces(costs, places_);
  if (HasFailed()) return GoOnOrBack(costs, best);
  if (window_ > learns_until_ && added_ < next_attempt_) return;
  const double now = costs[longest][places_[longest]];
  const double gain = now - LongestOf(costs, best);
  const double noise = sigmas_ * std::sqrt(error2(longest) + mean_error2);
  if (gain <= std::max(kLeastGain * now, noise)) return;
  next_attempt_ = added_ + kIntervalsBetweenAttempts;
  trial_.reset();
  if (step_.windows > 0) trial_ = {.before = places_, .step_before = step_, .gain = gain};
  MoveTo(best);
}

// Leaves shares that did not pay, for others if the costs that were measured promise more than the
// shares before, else for these.
void SharePlanner::Impl::GoOnOrBack(const CostTable& costs, const Places& best) {
  const double step = step_.mean + LongestOf(costs, best) - LongestOf(costs, places_);
  const double gain = trial_->step_before.mean - step;
  if (window_ <= learns_until_ && best != places_ && gain > kLeastGain * step) {
    trial_->gain = gain;
    return MoveTo(best);
  }
  const Trial trial = *std::exchange(trial_, std::nullopt);
  MoveTo(trial.before);
  step_ = trial.step_before;
  patience_ = std::min(2 * patience_, kMostPatience);
  next_change_ = window_ + patience_;
}

void SharePlanner::Impl::MoveTo(Places places) {
  places_ = std::move(places);
  for (size_t rank = 0; rank < places_.size(); ++rank)
    shares[rank] = ranks_[rank].sizes[places_[rank]];
  ++changes;
  step_ = {};
}

SharePlanner::SharePlanner(ShareLimits limits) : impl_(std::make_unique<Impl>(std::move(limits))) {}
SharePlanner::~SharePlanner() = default;
SharePlanner::SharePlanner(SharePlanner&&) noexcept = default;
SharePlanner& SharePlanner::operator=(SharePlanner&&) noexcept = default;

void SharePlanner::Add(absl::Span<const RankInterval> ranks) { impl_->Add(ranks); }
void SharePlanner::DropNext() { impl_->drops_next = true; }
const std::vector<int64_t>& SharePlanner::shares() const { return impl_->shares; }
const ShareLimits& SharePlanner::limits() const { return impl_->limits; }
int64_t SharePlanner::changes() const { return impl_->changes; }

}  // namespace evenkeel
