#include "evenkeel/join/step_divisor.h"

#include <algorithm>

namespace evenkeel {

double StepDivisor::ScaleOf(const StepAnswer& answer, bool reduces) {
  switch (by_) {
    case DivideBy::kInitialWorldSize:
      return 1.0 / (initial_world_size_ > 0 ? initial_world_size_ : answer.world_size);
    case DivideBy::kActiveRanks:
      return 1.0 / answer.active;
    case DivideBy::kSamples:
      break;
  }
  absl::MutexLock lock(&mutex_);
  if (answer.step == last_step_) return last_scale_;
  last_step_ = answer.step;
  // Samples counted before this loop's first step were reduced or dropped.
  if (!reduced_samples_.has_value()) reduced_samples_ = answer.samples_so_far - answer.samples;
  const int64_t samples = answer.samples_so_far - *reduced_samples_;
  last_scale_ = 1.0 / static_cast<double>(std::max<int64_t>(samples, 1));
  if (reduces) reduced_samples_ = answer.samples_so_far;
  return last_scale_;
}

void StepDivisor::OnOtherGroup() {
  absl::MutexLock lock(&mutex_);
  reduced_samples_.reset();
  last_step_ = -1;
}

}  // namespace evenkeel
