// The cost of a step on each rank, as tests of Balance sleep it, and the best division of a batch.
//
//   SleptRank own(workload, rank, world_size);
//   StepCost cost = own.Next(share, now_ms);               // sleep cost.computing_ms, ...
//   std::vector<int64_t> best = BestShares(workload, sizes, world_size, now_ms);
//   MeanStep(workload, best, now_ms);                      // without the reduction
//
// Threads: thread-compatible. Equal input gives equal costs.

#ifndef EVENKEEL_TESTS_BALANCE_SLEPT_COST_H_
#define EVENKEEL_TESTS_BALANCE_SLEPT_COST_H_

#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace evenkeel {

// A sample takes `sample_ms` on each rank, with the exceptions below. Fields `last_...` are about
// the last rank.
struct Workload {
  const char* name = "";
  int64_t even = 32;     // Samples per rank.
  double sample_ms = 1;  // Of forward and backward.
  double last_speed = 1;
  double first_speed = 1;     // Of rank 0.
  double period_ms = 0;       // last_speed applies in the second half of each; 0: always.
  double last_fixed_ms = 0;   // Of forward and backward.
  double second_pass_ms = 0;  // For a share above the even one.
  double last_input_ms = 0;
  double last_input_sample_ms = 0;
  // In each kEvery-th step of the last rank.
  double last_saving_ms = 0;
  double last_outside_ms = 0;
  double last_quota = 0;  // The part of each kQuotaPeriodMs in which it can compute; 0: all.
  bool computes = false;  // Instead of sleeping.
  // Only if ranks compute: the caller slows down the core of the last rank, by a process that takes
  // this much time per time of the rank, or to this part of the core.
  double last_neighbour = 0;
  double last_throttle = 0;
  // The time of forward and backward by share, of each rank, as measured; empty: as defined above.
  std::vector<std::map<int64_t, double>> measured_ms;

  // Returns whether last_speed applies.
  bool is_slow_at(double now_ms) const {
    return period_ms == 0 || 2 * std::fmod(now_ms, period_ms) >= period_ms;
  }

  static constexpr int kEvery = 20;
  static constexpr double kQuotaPeriodMs = 100;
};

struct StepCost {
  double input_ms = 0;
  double computing_ms = 0;
  double saving_ms = 0;
  double outside_ms = 0;
};

class SleptRank {
 public:
  // `workload` must outlive it.
  SleptRank(const Workload& workload, int rank, int world_size)
      : workload_(workload), rank_(rank), is_first_(rank == 0), is_last_(rank == world_size - 1) {}

  // Returns the cost of the next step, which begins at `now_ms`.
  StepCost Next(int64_t share, double now_ms);

 private:
  double ComputingMs(int64_t share, double now_ms);
  double WithQuota(double computing_ms, double now_ms);

  const Workload& workload_;
  const int rank_;
  const bool is_first_, is_last_;
  int64_t steps_ = 0;
  double quota_period_ = -1;  // Its number.
  double quota_used_ms_ = 0;
};

// Returns the mean of kEvery steps from `now_ms` on, each as long as its slowest rank.
double MeanStep(const Workload& workload, const std::vector<int64_t>& shares, double now_ms);

// Returns the division with the shortest MeanStep(). `sizes`: those that a share can have, equally
// spaced around the even one. All divisions are tried up to 4 ranks. For more ranks saving and time
// outside of steps are left out of the costs, so that the shortest longest cost is found exactly by
// adding each quantum where the cost is the least.
std::vector<int64_t> BestShares(const Workload& workload, const std::vector<int64_t>& sizes,
                                int world_size, double now_ms);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_BALANCE_SLEPT_COST_H_
