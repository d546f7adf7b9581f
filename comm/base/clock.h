// Deadlines that hold when the host's clock is set: by NTP, by an administrator, or because a
// virtual machine was stopped for a while.
//
//   const absl::Time deadline = SteadyNow() + timeout;
//   absl::MutexLock lock(&mutex_);
//   if (!AwaitUntil(mutex_, absl::Condition(&is_done_), deadline))
//     return absl::DeadlineExceededError("not done in time");
//
// Abseil's waits with a timeout or a deadline follow the host's clock, and so does absl::Now(): a
// clock that is set forward ends them at once, and one that is set back prolongs them. The
// libraries use these functions instead. absl::SleepFor() follows no clock.
//
// Threads: any. Conditions must not take locks. The first wait that blocks starts a thread that
//          stays until the process ends, and sleeps until the clock is set.

#ifndef EVENKEEL_COMM_BASE_CLOCK_H_
#define EVENKEEL_COMM_BASE_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace evenkeel {

// Returns the time that the host's clock would show if it had not been set since the first call. It
// never goes back. Times of different processes cannot be compared.
absl::Time SteadyNow();

// Wait until the condition is true, with `mutex` held by the caller. Return false if it is not true
// at the deadline, a time of SteadyNow(). Like Abseil's waits, they release `mutex` for a moment if
// the condition is false, even if the deadline has passed.
bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
inline bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  return AwaitUntil(mutex, condition, SteadyNow() + timeout);
}

// Waits for a signal, with `mutex` held by the caller, and like absl::CondVar sometimes returns
// without one. Returns true at the deadline.
bool WaitUntil(absl::CondVar& signal, absl::Mutex& mutex, absl::Time deadline)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_BASE_CLOCK_H_
