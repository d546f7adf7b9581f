#include "evenkeel/join/steps/internal/share_cost.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

namespace evenkeel {
namespace {

// An interval is a stall from this multiple of the usual one on.
constexpr double kStall = 3;
// An estimate is the mean of about this number of windows.
constexpr int kMemory = 32;

}  // namespace

void CostMeter::Add(int batch, double us) {
  sums_[batch] += us;
  second_ = std::max(second_, std::min(us, longest_));
  if (us > longest_) {
    longest_ = us;
    batch_of_longest_ = batch;
  }
}

MeasuredCost CostMeter::Take(const Counts& counts) {
  const auto intervals =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  const double all = std::accumulate(sums_.begin(), sums_.end(), 0.0);
  const double usual = (all - longest_ - second_) / (intervals - 2);
  const bool has_stall = longest_ > kStall * usual;
  const bool is_repeated = second_ > kStall * usual || std::popcount(stalls_ & 7) >= 2;
  if (has_stall && !is_repeated) sums_[batch_of_longest_] -= longest_ - usual;

  MeasuredCost result{.mean = std::accumulate(sums_.begin(), sums_.end(), 0.0) / intervals};
  for (int batch = 0; batch < kBatches; ++batch) {
    const double deviation = sums_[batch] / static_cast<double>(counts[batch]) - result.mean;
    result.error2 += deviation * deviation / (kBatches * (kBatches - 1));
  }
  const uint32_t stalls = stalls_ << 1 | (has_stall ? 1 : 0);
  *this = {};
  stalls_ = stalls;
  return result;
}

void CostEstimate::Add(const MeasuredCost& measured, int64_t window) {
  if (windows == kMemory)
    between -= between / kMemory;
  else
    ++windows;
  last_window = window;
  const double deviation = measured.mean - mean;
  mean += deviation / windows;
  within += (measured.error2 - within) / windows;
  between += deviation * (measured.mean - mean);
}

void CostEstimate::Scale(double ratio) {
  mean *= ratio;
  within *= ratio * ratio;
  between *= ratio * ratio;
}

// The batches of a window are the first degrees of freedom, the windows are the others.
double CostEstimate::error2() const {
  constexpr int kDegrees = CostMeter::kBatches - 1;
  return (kDegrees * within + between) / (kDegrees + windows - 1) / windows;
}

CostCurve::CostCurve(std::vector<int64_t> sizes, bool is_proportional)
    : sizes_(std::move(sizes)), is_proportional_(is_proportional), at_(sizes_.size()) {}

CostCurve::News CostCurve::Add(int i, const MeasuredCost& measured, int64_t window,
                               const Noise& noise) {
  News news = News::kNone;
  if (Differs(i, measured, noise)) {
    if (!std::exchange(is_in_doubt_, true)) return News::kDoubt;
    const double ratio = measured.mean / std::max(1.0, Costs()[i]);
    for (CostEstimate& estimate : at_) estimate.Scale(ratio);
    at_[i] = {};
    news = News::kChanged;
  }
  is_in_doubt_ = false;
  at_[i].Add(measured, window);
  return news;
}

void CostCurve::Forget(int64_t window, int i) {
  for (int other = 0; other < size(); ++other) {
    if (other != i && at_[other].last_window < window) at_[other] = {};
  }
}

std::vector<double> CostCurve::Costs() const {
  std::vector<double> costs(sizes_.size());
  for (int i = 0; i < size(); ++i) {
    costs[i] = CostAt(i);
    if (i > 0) costs[i] = std::max(costs[i], costs[i - 1]);
  }
  return costs;
}

// Returns the first measured size from `i` on in the direction `by`, or -1.
int CostCurve::Known(int i, int by) const {
  for (; i >= 0 && i < size(); i += by) {
    if (at_[i].windows > 0) return i;
  }
  return -1;
}

// A size that is new differs only if it costs less than a smaller one, or more than a larger one. A
// first window that has a part of two speeds has large errors, which must not hide the second
// speed.
bool CostCurve::Differs(int i, const MeasuredCost& measured, const Noise& noise) const {
  const auto exceeds = [&](double difference, const CostEstimate& known) {
    const double error2 =
        known.windows == 1 ? std::min(known.error2(), measured.error2) : known.error2();
    return difference > std::max(noise.least, noise.sigmas * std::sqrt(error2 + measured.error2));
  };
  const int lower = Known(i, -1);
  const int upper = Known(i, 1);
  return (lower >= 0 && exceeds(at_[lower].mean - measured.mean, at_[lower])) ||
         (upper >= 0 && exceeds(measured.mean - at_[upper].mean, at_[upper]));
}

double CostCurve::CostAt(int i) const {
  const int lower = Known(i, -1);
  const int upper = Known(i, 1);
  if (lower < 0 && upper < 0) return 0;
  const int near = lower >= 0 ? lower : upper;
  if (near == i) return at_[i].mean;
  const double slope = lower >= 0 && upper >= 0 ? SlopeBetween(lower, upper) : SlopeBeyond(near);
  return at_[near].mean + slope * static_cast<double>(sizes_[i] - sizes_[near]);
}

double CostCurve::SlopeOf(int a, int b) const {
  return (at_[b].mean - at_[a].mean) / static_cast<double>(sizes_[b] - sizes_[a]);
}

// A slope that is more than proportional is that of a jump somewhere between the sizes. Most of it
// is left out, so that larger sizes below the jump are tried, and each attempt excludes several.
double CostCurve::SlopeBetween(int lower, int upper) const {
  const double slope = SlopeOf(lower, upper);
  const double proportional = at_[lower].mean / static_cast<double>(sizes_[lower]);
  return slope > proportional ? (slope + 3 * proportional) / 4 : slope;
}

// Returns the slope beyond `end`, the first or the last measured size: that to the measured size at
// the other end, if noise does not explain it.
double CostCurve::SlopeBeyond(int end) const {
  const double proportional = at_[end].mean / static_cast<double>(sizes_[end]);
  const double usual = is_proportional_ ? proportional : 0;
  const int first = Known(0, 1);
  const int far = first != end ? first : Known(size() - 1, -1);
  if (far == end) return usual;
  const double slope = SlopeOf(far, end);
  const double excess = (slope - usual) * static_cast<double>(sizes_[end] - sizes_[far]);
  if (std::abs(excess) < 2 * std::sqrt(at_[end].error2() + at_[far].error2())) return usual;
  return std::clamp(slope, 0.0, proportional);
}

}  // namespace evenkeel
