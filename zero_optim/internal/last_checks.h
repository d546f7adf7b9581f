// The gradient checks of the last steps; on a device they are fetched at the first use.
//
//   checks.Begin();                           // with each step
//   options = checks.Decide(options, check);  // if the host has checked the gradients
//   checks.SetThere(&updater.device());       // if the device checks them
//   checks.last();                            // waits, on a device
//
// If the device has failed, the check reports that the gradients were not finite, and the next call
// to the device returns the error.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_LAST_CHECKS_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_LAST_CHECKS_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/zero_optim/device/device_update.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel::internal {

class LastChecks {
 public:
  void Begin() { before_ = std::exchange(last_, Entry()); }
  // Returns the step's options after the check: skipped or not, scaled by clipping. Keeps the
  // check.
  StepOptions Decide(const StepOptions& options, const GradientCheck& check) {
    StepOptions decided = options;
    decided.skip = options.skip || (options.skip_nonfinite && !check.is_finite);
    if (options.clip.has_value())
      decided.grad_scale *= ClipCoefficient(options.clip->max_norm, check.norm);
    last_.check = check;
    last_.check->is_skipped = decided.skip;
    return decided;
  }
  void SetThere(DeviceUpdate* device) { last_ = {.device = device, .number = device->checks()}; }

  const std::optional<GradientCheck>& last() const { return Fetch(last_); }
  const std::optional<GradientCheck>& before() const { return Fetch(before_); }

 private:
  struct Entry {
    std::optional<GradientCheck> check;
    DeviceUpdate* device = nullptr;  // The device that still has it; null: none.
    int64_t number = 0;
  };

  static const std::optional<GradientCheck>& Fetch(Entry& entry) {
    if (entry.device == nullptr) return entry.check;
    const auto fetched = entry.device->LastCheck(
        SteadyNow() + absl::Minutes(10), static_cast<int>(entry.device->checks() - entry.number));
    entry.device = nullptr;
    entry.check = GradientCheck{.norm = kInfinityNorm, .is_finite = false};
    if (fetched.ok() && fetched->has_value()) entry.check = *fetched;
    return entry.check;
  }

  mutable Entry last_, before_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_LAST_CHECKS_H_
