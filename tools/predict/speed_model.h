// A model of the time of a training step for any number of ranks, from the traces of a small run.
//
//   EK_ASSIGN_OR_RETURN(const SpeedModel model, SpeedModel::Fit(runs, links, {.backend = "tcp"}));
//   Forecast at = model.At({.ranks = 1024, .ranks_per_host = 1});
//   at.step;  // seconds; at.low and at.high enclose 95 % of the resampled predictions
//
// A step begins with the broadcast of buffers, if there are any. Then the ranks compute; the
// slowest one takes the median time plus the expected largest of as many normal deviations as there
// are ranks. The reduction of a bucket begins when that rank has the bucket, the ranks have agreed
// on the step, and the previous bucket is reduced. The step waits for the last bucket, and ends
// with the optimizer. An optimizer of slices updates its part and gathers the values: a bucket then
// costs half of an all-reduce before the optimizer, and half within it.
//
// Intervals: the model is fitted again to resampled steps and samples; then all collectives take
//            longer or shorter by the deviation of one sample from its fit. An error of the model
//            itself, such as a switch that is slower with more hosts, is not in the interval.
//
// Units:   seconds, bytes.
// Threads: values; pure functions. Resampling has a fixed seed.
// Source:  Efron, "Bootstrap methods", Annals of Statistics 1979; percentile interval.

#ifndef EVENKEEL_TOOLS_PREDICT_SPEED_MODEL_H_
#define EVENKEEL_TOOLS_PREDICT_SPEED_MODEL_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/tools/predict/cluster.h"
#include "evenkeel/tools/predict/traced_run.h"

namespace evenkeel {

// The parts of the median step of one rank.
struct StepParts {
  double begin = 0;          // BeginStep(), without the broadcast of buffers.
  double compute = 0;        // Data, forward and backward.
  double tail = 0;           // The end of FinishStep(), after all is computed and reduced.
  double optimizer = 0;      // With slices: of one rank that has them all. No communication.
  double last_gradient = 0;  // Since the end of BeginStep().
  double spread = 0;         // Standard deviation of a rank's `compute`, as a fraction of it.
  struct Bucket {
    int64_t bytes = 0;
    double ready = 0;  // Since the end of BeginStep().
  };
  std::vector<Bucket> buckets;
  int64_t buffer_bytes = 0;
  bool is_sliced = false;
};

struct Forecast {
  Layout where;
  double step = 0, low = 0, high = 0;
  double communication = 0;  // Sum over the buckets.
  double exposed = 0;        // After the last gradient of the slowest rank.
};

// Returns the forecast for a cluster whose ranks agree on the step `agreed` seconds after its
// start. The interval is empty.
Forecast Simulate(const StepParts& parts, const Cluster& cluster, const Layout& where,
                  double agreed);

// Returns the expected largest of `count` independent standard normal deviations.
double ExpectedLargest(int count);

struct ModelOptions {
  std::string backend;  // Empty: that of the first run.
  int cores = 0;        // See Cluster.
  // The time in which the ranks agree on a step, and its increase per rank. The defaults are those
  // of an exchange over TCP in docs/performance.md.
  double agreement = 30e-6, agreement_per_rank = 0.4e-6;
};

class SpeedModel {
 public:
  // `runs` must have the same buckets. `links` are added to the samples of the runs' own buckets.
  // Errors: InvalidArgument if there is no run, if the runs differ, or those of FitCluster().
  static absl::StatusOr<SpeedModel> Fit(std::span<const TracedRun> runs,
                                        std::span<const LevelSample> links,
                                        const ModelOptions& options);

  Forecast At(const Layout& where) const;

  const StepParts& parts() const { return parts_; }
  const Cluster& cluster() const { return cluster_; }
  const std::vector<LevelSample>& samples() const { return samples_; }

 private:
  struct Resampled {
    StepParts parts;
    Cluster cluster;
  };

  ModelOptions options_;
  std::vector<LevelSample> samples_;
  StepParts parts_;
  Cluster cluster_;
  std::vector<Resampled> resampled_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_PREDICT_SPEED_MODEL_H_
