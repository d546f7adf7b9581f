// The ranks that make the others wait, and the phase of the step in which they do: a value.
//
//   report.Stragglers();             // "rank 3 cost the group 18 % of the last 500 steps: input"
//
// join/straggler.h returns it for a group.
//
// Cost of a rank:  the time between the shortest and the longest busy time of an interval is caused
//                  by the ranks that were still busy, in equal parts at each moment (the Shapley
//                  value of the maximum). The cost of a rank is its part, less the median of the
//                  other ranks' parts: what all ranks cause by chance does not count.
// Straggler:       a rank whose cost is at least StragglerReport::kLeastCost of the time, at least
//                  kLeastCostPerStep, and many times its uncertainty, which the recent steps
//                  show. A single hiccup makes no straggler.
// Phase:           the phase in which a straggler spent most time beyond the median of the others.
// Ranks without inputs are not compared; the report has the time for which they had none.

#ifndef EVENKEEL_JOIN_STEPS_STRAGGLER_REPORT_H_
#define EVENKEEL_JOIN_STEPS_STRAGGLER_REPORT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

struct StragglerReport {
  // A straggler costs at least this fraction of the time, and this time per step, because for
  // minutes one core may wake its processes that much later than another (Linux's default timer
  // slack is 0.05 ms).
  static constexpr double kLeastCost = 0.02;
  static constexpr absl::Duration kLeastCostPerStep = absl::Microseconds(100);

  struct Rank {
    int rank = 0;                           // Its number in the job's first group.
    double cost = 0;                        // The fraction of `time` that this rank cost the group.
    double without_input = 0;               // The fraction of `time` in which it had no more input.
    bool is_straggler = false;              // Only in a report about recent steps.
    StepPhase phase = StepPhase::kOutside;  // The phase that explains most of the cost.
    PhaseTimes mean;                        // Over the steps in which it had inputs.
    double samples = 0;                     // In the mean of them; 0 if it does not report any.
    absl::Duration waited_for_others;  // In such a step: the wait beyond that of the last rank.
  };

  int64_t steps = 0;    // The number of steps covered.
  absl::Duration time;  // Their duration.
  std::vector<Rank> ranks;

  // Returns "ranks 3,5 cost the group 18 % of the last 500 steps: input", a part per phase, or "".
  // `name_of(rank)`, such as "host b", is added in parentheses; `rank` is the number in the job.
  std::string Stragglers(const std::function<std::string(int rank)>& name_of = nullptr) const;
  // Returns a table with a line per rank: its cost, the milliseconds of a step by phase, and those
  // of backward until the first and until the last bucket was complete, and its samples, if known.
  std::string Table() const;
  // Returns "ranks 5,7 had no input for 12 % of the time", or "".
  std::string RanksWithoutInput() const;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STRAGGLER_REPORT_H_
