// Decides how many samples of each global batch a rank gets, from the times that all ranks measured.
//
//   SharePlanner planner(limits);                       // EvenLimits(/*batch=*/256, {64, 64}, ...)
//   planner.Add(intervals);                             // by rank, after each reduction
//   planner.shares();                                   // {176, 80}: the sum is 256
//
// A rank's share is its even share and a multiple of the quantum, between its least and its most.
// So a rank has few sizes of batches, and they are known before training.
//
// The model: an interval goes from one reduction to the next (phase_clock.h). Of a rank's busy time
// in it, forward and backward depend on the share. The optimizer does not. Input does if it grew
// when the share did. Saving and unmarked time never move samples. The planner looks for shares
// that make the longest of the ranks' times as short as possible. A rank's time is taken to be
// proportional to its share, until shares that it has had show another slope.
//
// Windows: times are sums over at least kLeastIntervals intervals and kLeastWindow. Within one, a
//          single interval that is far longer than the others counts as a usual one; several of
//          them count as they are.
// Changes: are made between windows, and only where they pay. Constant speeds end in constant
//          shares: a change that did not pay is taken back, and the next one has to wait longer.
// Threads: thread-compatible. Equal input gives equal shares on all ranks.

#ifndef EVENKEEL_JOIN_STEPS_SHARE_PLANNER_H_
#define EVENKEEL_JOIN_STEPS_SHARE_PLANNER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

struct ShareLimits {
  int64_t batch = 0;     // Samples of a whole global batch, of all ranks together.
  int64_t quantum = 1;   // Shares differ from the even ones by multiples of it.
  std::vector<int64_t> least;  // By rank; at most the even share.
  std::vector<int64_t> most;   // By rank; at least the even share.

  int world_size() const { return static_cast<int>(least.size()); }
  // The first `batch % world_size()` ranks have one sample more than the others.
  int64_t even(int rank) const;
  // Returns all sizes that this rank's share can have, from the least one on.
  std::vector<int64_t> SizesOf(int rank) const;
};

// Errors: InvalidArgument: no rank, a batch with less than a sample for each of them, a quantum
// below 1, limits that do not contain the even share, or more than kMostSizes sizes for a rank.
absl::Status Check(const ShareLimits& limits);

// Returns the ranks' parts of a batch of `samples`, which may be a short one: its division is in
// proportion to `shares`, so that ranks may get no sample. Rank r has the samples from boundary r
// to boundary r + 1.
std::vector<int64_t> BoundariesOf(absl::Span<const int64_t> shares, int64_t samples);

class SharePlanner {
 public:
  static constexpr int kMostSizes = 16;
  static constexpr int64_t kLeastIntervals = 10;
  static constexpr absl::Duration kLeastWindow = absl::Milliseconds(500);

  // One rank between two reductions.
  struct RankInterval {
    std::optional<PhaseTimes> times;  // Without times the rank was exhausted.
    int64_t samples = 0;              // In all its passes.
  };

  // `limits`: checked.
  explicit SharePlanner(ShareLimits limits);

  // Adds an interval. Intervals that are no measure of the shares are dropped: a rank was
  // exhausted, saved, or had a size for the first time; or the shares are those of an earlier
  // decision.
  void Add(absl::Span<const RankInterval> ranks);
  // Tells that the next interval that is added, though usual in all else, is to be dropped: the
  // ranks evaluated in it, or did other work beside training.
  void DropNext();

  // Returns the shares of the next whole batch, by rank.
  const std::vector<int64_t>& shares() const { return shares_; }
  const ShareLimits& limits() const { return limits_; }
  // Returns how often the shares have changed.
  int64_t changes() const { return changes_; }

 private:
  const ShareLimits limits_;
  std::vector<int64_t> shares_;
  int64_t changes_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_SHARE_PLANNER_H_
