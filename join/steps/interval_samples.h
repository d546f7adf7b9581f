// Adds up the samples of each rank between two reductions.
//
//   IntervalSamples intervals(world_size);
//   intervals.Add(answer);             // by rank: the samples of the interval whose times it has
//
// A record has the times of an interval that ended before its step, and the samples of its step. An
// interval may have several steps, which accumulate gradients.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_JOIN_STEPS_INTERVAL_SAMPLES_H_
#define EVENKEEL_JOIN_STEPS_INTERVAL_SAMPLES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/join/steps/step_agreement.h"

namespace evenkeel {

class IntervalSamples {
 public:
  explicit IntervalSamples(int world_size)
      : current_(world_size), ended_(world_size), timed_(world_size) {}

  // Handles the records of the next step. The result is valid until the next call, and zeros if no
  // interval ended before this step.
  absl::Span<const int64_t> Add(const StepAnswer& answer) {
    timed_.swap(ended_);
    std::ranges::fill(ended_, 0);
    for (int rank = 0; rank < answer.world_size; ++rank)
      current_[rank] += std::max<int64_t>(answer.record(rank).samples, 0);
    if (answer.reduces()) ended_.swap(current_);
    return timed_;
  }

 private:
  // By rank, of the interval that has not ended, of the one that the last step ended, and of the
  // one before.
  std::vector<int64_t> current_, ended_, timed_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_INTERVAL_SAMPLES_H_
