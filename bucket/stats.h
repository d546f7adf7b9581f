// The settings, the plan and the step times of a reducer, for logs, dashboards and bug reports.
//
//   ReducerStats stats = ddp->reducer().stats();
//   stats.means.exposed_us;            // mean time per step of communication after backward
//   std::puts(ToJson(stats).c_str());  // one line; names include their units, their order is fixed
//
// Times are means over the first ten synchronising steps and every `stats_every`-th later one,
// since measuring a step costs a few allocations. stats() collects all other values, so they cost
// the steps nothing.
//
// Threads: values.
// Source:  what PyTorch's DDP logger records (torch/csrc/distributed/c10d/logger.cpp).

#ifndef EVENKEEL_BUCKET_STATS_H_
#define EVENKEEL_BUCKET_STATS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/step_times.h"

namespace evenkeel {

// Means over the measured steps, in microseconds. StepDurations (step_times.h) defines each time.
struct StepMeans {
  int64_t measured_steps = 0;
  double to_first_gradient_us = 0;
  double backward_us = 0;
  double communication_us = 0;
  double exposed_us = 0;
  double overlapped_us = 0;
};

// Decides which steps are measured, and computes their means, without allocating memory.
class StepAverages {
 public:
  static constexpr int64_t kFirstSteps = 10;

  explicit StepAverages(int64_t every) : every_(every) {}
  // Returns whether the step is measured that follows `steps` others.
  bool IsMeasured(int64_t steps) const { return steps < kFirstSteps || steps % every_ == 0; }
  void Add(const StepDurations& took);
  const StepMeans& means() const { return means_; }

 private:
  const int64_t every_;
  StepMeans means_;
};

struct BucketStats {
  int64_t bytes = 0;
  Bytes limit;
  std::vector<int> params;
};

// The choice of caps by measurement (plan/tuner.h).
struct TuningStats {
  bool is_on = false;
  bool is_done = false;
  double link_latency_us = 0;
  double link_bytes_per_second = 0;
  double launch_us = 0;
  // Exposed communication per step: "before" with the caps that were in use during the measurement,
  // "after" with the chosen caps.
  double predicted_before_us = 0, predicted_after_us = 0;
  double measured_before_us = 0, measured_after_us = 0;  // On this rank.
  int64_t measured_after_steps = 0;
};

struct ReducerStats {
  // Its settings.
  std::string name;
  std::string backend;
  int rank = 0;
  int world_size = 1;
  int parameters = 0;
  int64_t parameter_bytes = 0;
  std::vector<Bytes> caps;
  bool small_last_bucket = false;  // CapOrder::kFromLastReady.
  bool gradient_as_bucket_view = false;
  bool coalesced = false;  // Fusion::kCoalesced, in the plan in force.
  bool find_unused = false;
  bool skip_unused_buckets = false;
  bool static_graph = false;

  // The plan in force.
  uint64_t generation = 0;
  uint64_t mask_hash = 0;
  int trained_parameters = 0;
  bool order_is_final = false;
  std::vector<int> ready_order;  // All parameters; empty while it is not recorded.
  std::vector<BucketStats> buckets;

  // History.
  int64_t steps = 0;           // Synchronising steps, those that this rank shadowed included.
  int64_t shadowed_steps = 0;  // Synchronising steps in which this rank was exhausted.
  bool is_joined = false;      // This rank was exhausted in the last step.
  int64_t rebuilds = 0;        // New plans after a recorded order or measured caps.
  int64_t refreshes = 0;       // New plans after a change of the set of trained parameters.
  int64_t imports = 0;         // Plans imported from another rank, or by ImportPlan().
  // The number of latest synchronising steps in which the same parameters were unused on this rank.
  int64_t same_unused_steps = 0;
  // find_unused is on, and in all steps, at least two and none of them shadowed, the same
  // parameters were unused on this rank: static_graph would do.
  bool static_graph_would_do = false;
  std::string last_error;

  StepMeans means;
  TuningStats tuning;
};

std::string ToJson(const ReducerStats& stats);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_STATS_H_
