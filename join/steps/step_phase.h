// The phases of a training step, and the time that one rank spends in each: values.
//
//   PhaseTimes times;
//   times.busy(StepPhase::kForward) = 1200;
//
// join/phase.h marks phases in a loop; phase_clock.h measures them.

#ifndef EVENKEEL_JOIN_STEPS_STEP_PHASE_H_
#define EVENKEEL_JOIN_STEPS_STEP_PHASE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel {

enum class StepPhase : uint8_t {
  kOutside,   // Between steps, without a mark.
  kInput,     // The next batch is loaded.
  kForward,   // From BeginStep() to the first gradient.
  kBackward,  // From the first gradient to the end of FinishStep().
  kOptimizer,
  kSaving,
};
inline constexpr int kStepPhases = 6;

// The longest time that a rank can report: sums over many steps remain far from overflow.
inline constexpr uint64_t kMostMicroseconds = uint64_t{1} << 50;

// Returns "outside of the step", "input", "forward", ...
absl::string_view NameOf(StepPhase phase);

// The time from the beginning of backward until the first and until the last bucket of gradients
// was complete, on the host. The sum, if a step has several reductions. Buckets that were complete
// before, without a gradient, do not count.
struct BucketsReady {
  int64_t first_us = 0;
  int64_t last_us = 0;  // 0: neither is known.
  friend bool operator==(const BucketsReady&, const BucketsReady&) = default;

  // 2 to 6 bytes.
  static void VisitFields(auto& self, auto& visit) {
    visit(visit.Small(self.first_us, kMostMicroseconds),
          visit.Small(self.last_us, kMostMicroseconds));
  }
};

// The time from one reduction to the next on one rank.
struct PhaseTimes {
  std::array<int64_t, kStepPhases> busy_us = {};  // By phase, without waits.
  int64_t waited_us = 0;  // In calls that wait for other ranks: communication, and slow ranks.
  BucketsReady ready;

  int64_t& busy(StepPhase phase) { return busy_us[static_cast<size_t>(phase)]; }
  int64_t busy(StepPhase phase) const { return busy_us[static_cast<size_t>(phase)]; }
  int64_t all_busy_us() const {
    return std::accumulate(busy_us.begin(), busy_us.end(), int64_t{0});
  }
  int64_t total_us() const { return all_busy_us() + waited_us; }

  PhaseTimes& operator+=(const PhaseTimes& other) {
    for (size_t i = 0; i < busy_us.size(); ++i) busy_us[i] += other.busy_us[i];
    waited_us += other.waited_us;
    ready.first_us += other.ready.first_us;
    ready.last_us += other.ready.last_us;
    return *this;
  }
  PhaseTimes& operator/=(int64_t count) {
    for (int64_t& busy : busy_us) busy /= count;
    waited_us /= count;
    ready.first_us /= count;
    ready.last_us /= count;
    return *this;
  }
  friend bool operator==(const PhaseTimes&, const PhaseTimes&) = default;

  // 7 to 21 bytes, without `ready`.
  static void VisitFields(auto& self, auto& visit) {
    for (auto& busy : self.busy_us) visit(visit.Small(busy, kMostMicroseconds));
    visit(visit.Small(self.waited_us, kMostMicroseconds));
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_PHASE_H_
