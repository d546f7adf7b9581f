// Divides batches that are loaded some steps before they are trained, from the ranks' times, which
// they exchange in each step: those of the step before.
//
//   LaggedShares shares({.limits = limits, .lag = 6, .steps_before = 0});
//   shares.Add(step, times);                       // of all ranks, after each step
//   if (shares.CanDivide(step)) boundaries = shares.Divide(step, samples);
//
// Shares of a step are those that SharePlanner finds in the times of all steps up to `lag` before
// it, and of no later ones: so they are equal on all ranks, however far ahead each loads its
// batches. After RestartAt(step) they use all times that were exchanged before. The interval that
// ends with that step is not measured: what came between is in it, such as an evaluation. A step
// has one batch or more: with accumulation each has the shares of the first.
//
// Threads: thread-compatible. Equal input gives equal shares.

#ifndef EVENKEEL_JOIN_STEPS_LAGGED_SHARES_H_
#define EVENKEEL_JOIN_STEPS_LAGGED_SHARES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/join/steps/share_planner.h"
#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

class LaggedShares {
 public:
  struct Options {
    ShareLimits limits;  // Check() accepts them.
    int64_t lag = 2;     // In steps.
    // Times up to this step are no measure of the shares. Steps are counted from 1.
    int64_t steps_before = 0;
  };
  explicit LaggedShares(Options options);

  // Adds the times of a step, by rank. Steps are added in ascending order, without a gap after the
  // first.
  void Add(int64_t step, std::vector<PhaseTimes> times);

  // Returns the last step whose times Divide(step, ...) needs; 0: it needs none.
  int64_t LastNeeded(int64_t step) const;
  // Returns whether all times that Divide(step, ...) needs were added.
  bool CanDivide(int64_t step) const { return newest_ >= LastNeeded(step); }
  // Returns the ranks' parts of the step's next batch, as BoundariesOf(). Requires CanDivide(step):
  // without these times the ranks' shares may differ. `step` never decreases, except after
  // RestartAt().
  std::vector<int64_t> Divide(int64_t step, int64_t samples);
  // Forgets the batches from this step on: they are not trained. Steps before it have ended, and
  // the times of the last one of these are exchanged in the step `step`.
  void RestartAt(int64_t step);

  int64_t batch() const { return planner_.limits().batch; }
  // The shares of whole batches that the last Divide() used, by rank.
  const std::vector<int64_t>& shares() const { return shares_; }
  // The samples of a step that was divided, by rank; empty for other steps, for old ones, and for
  // that of RestartAt().
  std::vector<int64_t> SamplesOf(int64_t step) const;

 private:
  void Use(int64_t last);

  const int64_t lag_;
  const int64_t steps_before_;
  SharePlanner planner_;
  int64_t newest_ = 0;
  int64_t restarted_at_ = 0;
  std::deque<std::pair<int64_t, std::vector<PhaseTimes>>> times_;  // Not shown to the planner yet.
  std::map<int64_t, std::vector<int64_t>> samples_;                // By step and rank, likewise.
  int64_t step_ = 0;                                               // The step of shares_; 0: none.
  std::vector<int64_t> shares_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_LAGGED_SHARES_H_
