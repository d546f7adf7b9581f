// Measures the phases of one rank's steps.
//
//   clock.Enter(StepPhase::kForward);         // BeginStep()
//   clock.BeginBackward();                    // each gradient: only the first one counts
//   clock.EndReduction();                     // FinishStep(): all ranks leave it together
//   std::optional<PhaseTimes> times = clock.Take();        // for the next step's record
//
// An interval goes from one EndReduction() to the next. Ranks need no common clock: a reduction
// ends on all of them at the same time, so the rank that was busy for longest in an interval was
// the last one. Time in waits of the library (comm/control/waits.h) is counted apart.
//
// Threads: thread-safe. Waits count for the thread that called EndReduction(); a backward pass that
//          announces gradients from other threads does not wait.

#ifndef EVENKEEL_JOIN_STEPS_PHASE_CLOCK_H_
#define EVENKEEL_JOIN_STEPS_PHASE_CLOCK_H_

#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

class PhaseClock {
 public:
  // Ends the current phase and begins `next`. Returns the phase before.
  StepPhase Enter(StepPhase next);
  StepPhase phase() const { return phase_.load(std::memory_order_relaxed); }
  // Enters kBackward from kForward; in other phases does nothing.
  void BeginBackward() {
    if (phase_.load(std::memory_order_relaxed) == StepPhase::kForward) Enter(StepPhase::kBackward);
  }
  // Returns when the last backward of the current interval began; InfiniteFuture() if none has.
  absl::Time backward_began() const;
  // Ends the current interval, with `ready` limited to its duration, and begins one outside of the
  // step.
  void EndReduction(const BucketsReady& ready = {});
  // Drops the current interval; the next one begins with the next EndReduction(). For ranks that
  // do not take part in steps.
  void Reset();
  // Returns the sum of the intervals that have ended since the last call; nullopt if none has.
  std::optional<PhaseTimes> Take();

 private:
  void Charge() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::atomic<StepPhase> phase_ = StepPhase::kOutside;  // Written with the lock held.
  bool is_running_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread::id owner_ ABSL_GUARDED_BY(mutex_);  // The thread whose waits count.
  int64_t since_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t waited_before_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time backward_began_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::array<int64_t, kStepPhases> busy_ns_ ABSL_GUARDED_BY(mutex_) = {};
  int64_t waited_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<PhaseTimes> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_PHASE_CLOCK_H_
