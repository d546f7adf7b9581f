// Decides how many samples of each global batch a rank gets, from the times that all ranks
// measured.
//
//   SharePlanner planner({.batch = 256, .quantum = 16, .least = {64, 64}, .most = {192, 192}});
//   planner.Add(intervals);                             // by rank, after each reduction
//   planner.shares();                                   // {176, 80}: the sum is 256
//
// A rank's share is its even share and a multiple of the quantum, between its least and its most.
// So a rank has few sizes of batches, and they are known before training.
//
// The model: an interval goes from one reduction to the next (phase_clock.h). A rank's cost is its
// busy time in forward, backward, input and the optimizer. Forward and backward depend on the
// share, the optimizer does not, and input does if it grew when the share did. Saving and unmarked
// time never move samples. The planner looks for the shares with the shortest longest cost, and
// among those for the fewest moves. It has a table of each rank's costs at the sizes that it has
// measured. Between two of these the cost is on a line, or below it if there is a jump between
// them. Beyond them it is proportional to the share, or has another slope if the measured sizes
// show one that noise does not explain. A cost that changes at
// a known size scales the whole table, once two windows agree: the first has a part of both speeds.
// Costs of other sizes are forgotten after kPatience windows.
//
// Windows: times are means over at least kLeastIntervals intervals and kLeastWindow. Within one, a
//          single interval that is far longer than the others counts as a usual one; several of
//          them count as they are, and so do those that recur in several windows.
// Changes: are made between windows, and only where the model promises more than its noise and 2 %.
//          A change is on trial until the mean step has become shorter, or for 8 windows without a
//          clear result. If the step has not become shorter, the change is taken back. The next one
//          waits for twice kPatience windows, and each time twice as long, until a speed changes:
//          constant speeds end in constant shares. In the first kPatience windows after a change of
//          speed, other shares that the measured costs suggest are tried before a change is taken
//          back, which finds the sizes below a jump; later, attempts are 100 intervals apart.
// Threads: thread-compatible. Equal input gives equal shares on all ranks of the same build and
//          architecture.
// Cost:    of Add(): O(ranks); at the end of a window O(ranks * sizes * log(ranks)).

#ifndef EVENKEEL_JOIN_STEPS_SHARE_PLANNER_H_
#define EVENKEEL_JOIN_STEPS_SHARE_PLANNER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

// Limits of one rank's share of a whole batch.
struct RankLimits {
  int64_t least = 0;
  int64_t most = 0;

  // Returns these limits, with defaults for those that are 0. Below the even share: all sizes from
  // a quantum on; above it: those up to twice the even share. Where there are more than
  // SharePlanner::kMostSizes sizes between the limits, defaults are nearer to the even share.
  RankLimits WithDefaults(int64_t quantum, int64_t even) const;
  static void VisitFields(auto& self, auto& visit) { visit(self.least, self.most); }
};

// Returns `quantum`, or an eighth of the even share if it is 0.
int64_t DefaultQuantum(int64_t quantum, int64_t batch, int world_size);

struct ShareLimits {
  int64_t batch = 0;           // Samples of a whole global batch, of all ranks together.
  int64_t quantum = 1;         // Shares differ from the even ones by multiples of it.
  std::vector<int64_t> least;  // By rank; from one sample to the even share.
  std::vector<int64_t> most;   // By rank; at least the even share.

  int world_size() const { return static_cast<int>(least.size()); }
  // The first `batch % world_size()` ranks have one sample more than the others.
  int64_t even(int rank) const;
  // Returns all sizes that this rank's share can have, from the least one on.
  std::vector<int64_t> SizesOf(int rank) const;
};

// Errors: InvalidArgument: no rank, limits of different numbers of ranks, a batch with less than a
// sample for each rank or with 2^31 samples, a quantum below 1, limits that do not contain the even
// share, or more than SharePlanner::kMostSizes sizes for a rank.
absl::Status Check(const ShareLimits& limits);

// Returns the ranks' parts of a batch of `samples`, which may be a short one: its division is in
// proportion to `shares`, so that ranks may get no sample. Rank r has the samples from boundary r
// up to boundary r + 1, which is excluded.
std::vector<int64_t> BoundariesOf(absl::Span<const int64_t> shares,
                                  int64_t samples);  // [ranks + 1]

// Reports changes of the shares by a tenth or more.
class ShareNews {
 public:
  explicit ShareNews(std::vector<int64_t> shares) : reported_(std::move(shares)) {}
  // Returns "ranks compute 176,80 of 256 samples (128,128 before)" if a share differs by a tenth or
  // more from that of the last sentence; else "". It lists at most 16 ranks.
  std::string Take(absl::Span<const int64_t> shares);

 private:
  std::vector<int64_t> reported_;
};

class SharePlanner {
 public:
  static constexpr int kMostSizes = 16;
  static constexpr int64_t kLeastIntervals = 10;
  static constexpr absl::Duration kLeastWindow = absl::Milliseconds(500);
  static constexpr int64_t kPatience = 8;  // Windows.

  // One rank between two reductions.
  struct RankInterval {
    std::optional<PhaseTimes> times;  // Without times the rank was exhausted.
    int64_t samples = 0;              // In all its passes.
  };

  // `limits`: Check() accepts them.
  explicit SharePlanner(ShareLimits limits);
  ~SharePlanner();
  SharePlanner(SharePlanner&&) noexcept;
  SharePlanner& operator=(SharePlanner&&) noexcept;

  // Adds an interval, of all ranks. Intervals that are no measure of the shares are dropped: a rank
  // was exhausted, saved for more than 2 % of it, or had a size for the first time; or the samples
  // are no multiple of the shares: a short batch, or the shares of an earlier decision.
  void Add(absl::Span<const RankInterval> ranks);
  // Drops the next interval that is added, whatever its times: the ranks evaluated in it, or did
  // other work beside training.
  void DropNext();

  // Returns the shares of the next whole batch, by rank.
  const std::vector<int64_t>& shares() const;
  const ShareLimits& limits() const;
  // Returns how often the shares have changed.
  int64_t changes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_SHARE_PLANNER_H_
