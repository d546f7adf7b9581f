// Predicts the times at which the buckets of a plan are reduced, from the times of the gradients
// and the cost of the link, to compare plans without running them.
//
//   LinkCost link = FitLink(samples);  // {bytes, nanoseconds} of reductions that ran
//   Prediction prediction = Predict(plan, specs, ready_ns, link);
//   prediction.exposed_ns;  // the communication that backward does not hide
//
// The model: a bucket is launched when its gradients are ready and the previous bucket is launched;
// reductions use the link in this order, one at a time, each for latency + bytes / bandwidth. A
// launch occupies the thread that runs backward for `launch_ns`, and delays all later gradients by
// this.
//
// Units:   nanoseconds since any moment before the first gradient; bytes. All integers: ranks that
//          compute with the same numbers get the same result, on every machine.
// Threads: pure functions.
// Source:  the overlap of Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3; Sen,
//          "Estimates of the regression coefficient based on Kendall's tau", JASA 1968.

#ifndef EVENKEEL_BUCKET_PLAN_COST_MODEL_H_
#define EVENKEEL_BUCKET_PLAN_COST_MODEL_H_

#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/bucket/plan/planner.h"

namespace evenkeel {

// The cost of a reduction.
struct LinkCost {
  int64_t latency_ns = 0;  // Per reduction, whatever its size.
  int64_t ns_per_mib = 0;
  int64_t launch_ns = 0;  // On the thread that runs backward.

  int64_t ReductionNs(int64_t bytes) const;
  double bytes_per_second() const;  // Infinity if bytes cost nothing.

  friend bool operator==(const LinkCost&, const LinkCost&) = default;
};

struct LinkSample {
  int64_t bytes = 0;
  int64_t ns = 0;  // From when the link was free for it until it was reduced.
};

// Returns the median: for an even count the upper one of the middle; 0 for no numbers.
int64_t MedianOf(std::vector<int64_t> values);

// Returns whether the samples' sizes differ enough to separate latency from bandwidth: by a factor
// of 2.
bool CanFit(std::span<const LinkSample> samples);
// Returns a robust fit: the median of the slopes between any two samples, then the median of the
// rest. Neither is negative. For samples of only one size all time counts as bandwidth. `launch_ns`
// is 0.
LinkCost FitLink(std::span<const LinkSample> samples);

struct BucketPrediction {
  int64_t ready_ns = 0;     // Its last gradient is ready.
  int64_t launched_ns = 0;  // The previous bucket is launched, too.
  int64_t reduced_ns = 0;
};

struct Prediction {
  std::vector<BucketPrediction> buckets;
  int64_t last_gradient_ns = 0;  // Without any launch.
  int64_t end_ns = 0;            // Backward has ended and all is reduced.
  int64_t exposed_ns = 0;        // The time between those two.
};

// `ready_ns` has one entry per parameter; those of parameters that are not planned do not count.
Prediction Predict(const BucketPlan& plan, std::span<const ParamSpec> specs,
                   std::span<const int64_t> ready_ns, const LinkCost& link);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PLAN_COST_MODEL_H_
