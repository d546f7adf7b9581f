// Says when the buckets of a plan would be reduced, from when gradients are ready and what the link costs: to compare
// plans without running them.
//
//   LinkCost link = FitLink(samples);                                  // {bytes, nanoseconds} of reductions that ran
//   Prediction prediction = Predict(plan, specs, ready_ns, link);
//   prediction.exposed_ns;                                             // what backward does not hide
//
// The model: a bucket is launched when its gradients are there and the bucket before it is launched; reductions go over
// the link in this order, one at a time, each for latency + bytes / bandwidth. A launch takes the thread that runs
// backward `launch_ns`, so all later gradients are ready later by that.
//
// Units:   nanoseconds since any moment before the first gradient; bytes. All integers: ranks that calculate with the
//          same numbers come to the same result, on every machine.
// Threads: pure functions.
// Source:  the overlap of Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3; Sen, "Estimates of the regression
//          coefficient based on Kendall's tau", JASA 1968.

#ifndef EVENKEEL_BUCKET_COST_MODEL_H_
#define EVENKEEL_BUCKET_COST_MODEL_H_

#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/bucket/planner.h"

namespace evenkeel {

// What a reduction costs.
struct LinkCost {
  int64_t latency_ns = 0;  // Of one reduction, whatever its size.
  int64_t ns_per_mib = 0;
  int64_t launch_ns = 0;  // Of the thread that runs backward.

  int64_t ReductionNs(int64_t bytes) const;
  double bytes_per_second() const;  // Infinity if bytes cost nothing.

  friend bool operator==(const LinkCost&, const LinkCost&) = default;
};

struct LinkSample {
  int64_t bytes = 0;
  int64_t ns = 0;  // From when the link was free for it until it was reduced.
};

// Whether the samples' sizes lie far enough apart to tell latency from bandwidth: a factor of two.
bool CanFit(std::span<const LinkSample> samples);
// The line through the samples that outliers do not move: the median of the slopes between any two, and of what is left
// then. Neither is negative. Samples of one size only: all of it is bandwidth. `launch_ns` is 0.
LinkCost FitLink(std::span<const LinkSample> samples);

struct BucketPrediction {
  int64_t ready_ns = 0;     // Its last gradient is there.
  int64_t launched_ns = 0;  // And it is its turn.
  int64_t reduced_ns = 0;
};

struct Prediction {
  std::vector<BucketPrediction> buckets;
  int64_t last_gradient_ns = 0;  // If nothing were launched.
  int64_t end_ns = 0;            // Backward has ended and all is reduced.
  int64_t exposed_ns = 0;        // The time between those two.
};

// `ready_ns` has one entry per parameter; those of parameters that are not planned do not count.
Prediction Predict(const BucketPlan& plan, std::span<const ParamSpec> specs, std::span<const int64_t> ready_ns,
                   const LinkCost& link);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_COST_MODEL_H_
