// What a reducer is made of and what its steps take: for logs, dashboards and bug reports.
//
//   ReducerStats stats = ddp->reducer().stats();
//   stats.means.exposed_us;                        // per step, of what backward did not hide
//   std::puts(ToJson(stats).c_str());              // one line; names carry their units, and keep their order
//
// Times are means over the first ten synchronising steps and then every `stats_every`-th: exact times cost a few
// allocations. All else is put together when somebody asks, so that steps don't pay for it.
//
// Threads: values.
// Source:  what PyTorch's DDP logger records (torch/csrc/distributed/c10d/logger.cpp).

#ifndef EVENKEEL_BUCKET_STATS_H_
#define EVENKEEL_BUCKET_STATS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/bucket/step_times.h"

namespace evenkeel {

// Means over the steps that were measured, in microseconds; StepDurations says what of.
struct StepMeans {
  int64_t measured_steps = 0;
  double to_first_gradient_us = 0;
  double backward_us = 0;
  double communication_us = 0;
  double exposed_us = 0;
  double overlapped_us = 0;
};

// Which steps are measured, and their means. Takes no memory.
class StepAverages {
 public:
  static constexpr int64_t kFirstSteps = 10;

  explicit StepAverages(int64_t every) : every_(every) {}
  // Whether the step after `steps` others is measured.
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

// Caps that were chosen by measurement (tuner.h).
struct TuningStats {
  bool is_on = false;
  bool is_done = false;
  double link_latency_us = 0;
  double link_bytes_per_second = 0;
  double launch_us = 0;
  // Exposed communication per step, before with the caps that were in use and after with those that were chosen.
  double predicted_before_us = 0, predicted_after_us = 0;
  double measured_before_us = 0, measured_after_us = 0;  // On this rank.
  int64_t measured_after_steps = 0;
};

// Fusion::kMeasured: from the first gradient to the step's end, of the slowest rank.
struct FusionStats {
  bool is_on = false;
  bool is_done = false;
  double flat_us = 0, coalesced_us = 0;
};

struct ReducerStats {
  // How it was made.
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
  std::vector<int> ready_order;  // All parameters; empty: not recorded yet.
  std::vector<BucketStats> buckets;

  // What has happened.
  int64_t steps = 0;           // Synchronising ones, shadowed ones too.
  int64_t shadowed_steps = 0;  // This rank had run out of inputs.
  bool is_joined = false;      // It had in the last step.
  int64_t rebuilds = 0;        // New plans by a recorded order or measured caps,
  int64_t refreshes = 0;       // by a change of what is trained,
  int64_t imports = 0;         // and those that others made.
  int64_t same_unused_steps = 0;
  bool static_graph_would_do = false;  // find_unused, and in each step the same parameters were unused on this rank.
  std::string last_error;

  StepMeans means;
  TuningStats tuning;
  FusionStats fusion;
};

std::string ToJson(const ReducerStats& stats);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_STATS_H_
