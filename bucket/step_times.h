// The times of a synchronising step on one rank.
//
//   StepDurations took = Durations(reducer.last_step());
//   took.exposed;                       // the communication that backward did not hide
//
// Forward is not measured: a step begins with BeginStep(), so `to_first_gradient` includes forward
// and the part of backward before its first gradient.
//
// Units:   times are those of SteadyNow() (comm/base/clock.h).
// Threads: values.

#ifndef EVENKEEL_BUCKET_STEP_TIMES_H_
#define EVENKEEL_BUCKET_STEP_TIMES_H_

#include <algorithm>
#include <vector>

#include "absl/time/time.h"

namespace evenkeel {

// The times at which a bucket was ready, launched and reduced, and the number of the step's
// gradients at its launch. Without a thread of the reduction, the end of a bucket that backward
// hides is exact only in measured steps (stats.h, tuner.h); else it is the time at which the step
// waits for it.
struct BucketTimes {
  absl::Time ready = absl::InfiniteFuture();
  absl::Time launched = absl::InfiniteFuture();
  absl::Time reduced = absl::InfiniteFuture();
  int gradients_at_launch = 0;
};

struct StepTimes {
  absl::Time begin;
  absl::Time first_gradient;
  absl::Time last_gradient;  // The last announcement of backward.
  absl::Time end;
  int gradients = 0;
  std::vector<BucketTimes> buckets;
  bool is_measured = false;  // Buckets' ends are exact, those that backward hides included.
};

struct StepDurations {
  absl::Duration to_first_gradient;
  absl::Duration backward;       // From the first gradient to the last.
  absl::Duration communication;  // The time with a bucket in flight.
  absl::Duration exposed;        // From the last gradient to the step's end.
  absl::Duration overlapped;     // The part of the communication before the last gradient.
};

// Returns the time from which the bucket occupied the channel: when it had been launched and the
// bucket before it had been reduced.
inline absl::Time StartOf(const StepTimes& step, size_t bucket) {
  const absl::Time launched = step.buckets[bucket].launched;
  return bucket == 0 ? launched : std::max(launched, step.buckets[bucket - 1].reduced);
}

inline StepDurations Durations(const StepTimes& step) {
  StepDurations took;
  if (step.gradients == 0) return took;
  took.to_first_gradient = step.first_gradient - step.begin;
  took.backward = step.last_gradient - step.first_gradient;
  took.exposed = step.end - step.last_gradient;
  for (size_t b = 0; b < step.buckets.size(); ++b) {
    const absl::Time start = StartOf(step, b), reduced = step.buckets[b].reduced;
    if (start == absl::InfiniteFuture() || reduced <= start) continue;
    took.communication += reduced - start;
    took.overlapped +=
        std::max(absl::ZeroDuration(), std::min(reduced, step.last_gradient) - start);
  }
  return took;
}

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_STEP_TIMES_H_
