// What a synchronising step did, and when, on one rank.
//
//   StepDurations took = Durations(reducer.last_step());
//   took.exposed;                       // what backward did not hide of the communication
//
// Forward is not seen: a step begins with BeginStep(), so `to_first_gradient` has forward and what backward does before
// its first gradient.
//
// Threads: values.

#ifndef EVENKEEL_BUCKET_STEP_TIMES_H_
#define EVENKEEL_BUCKET_STEP_TIMES_H_

#include <algorithm>
#include <vector>

#include "absl/time/time.h"

namespace evenkeel {

// When a bucket of a step was ready, launched and reduced; and how many gradients of the step there were at its launch.
// Without a thread of the reduction's, the end of a bucket that backward hides is known only in steps that are measured
// (stats.h, tuner.h); in others it counts as reduced when the step comes to wait for it.
struct BucketTimes {
  absl::Time ready = absl::InfiniteFuture();
  absl::Time launched = absl::InfiniteFuture();
  absl::Time reduced = absl::InfiniteFuture();
  int gradients_at_launch = 0;
};

struct StepTimes {
  absl::Time begin;
  absl::Time first_gradient;
  absl::Time last_gradient;  // Backward had nothing left to announce.
  absl::Time end;
  int gradients = 0;
  std::vector<BucketTimes> buckets;
  bool is_measured = false;  // Buckets' ends are exact, those that backward hides included.
};

struct StepDurations {
  absl::Duration to_first_gradient;
  absl::Duration backward;       // From the first gradient to the last.
  absl::Duration communication;  // During which a bucket was on its way.
  absl::Duration exposed;        // From the last gradient to the step's end.
  absl::Duration overlapped;     // Of the communication, what lies before the last gradient.
};

// From when the bucket was launched and the one before it reduced.
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
    took.overlapped += std::max(absl::ZeroDuration(), std::min(reduced, step.last_gradient) - start);
  }
  return took;
}

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_STEP_TIMES_H_
