// Something that happens once, for others to wait for: absl::Notification on the steady clock.
//
//   auto arrived = std::make_shared<Notification>();
//   control.Exchange(topic, mine, [arrived](auto) { arrived->Notify(); });
//   if (!arrived->WaitUntil(SteadyNow() + timeout)) return absl::DeadlineExceededError(...);
//
// Threads: any.

#ifndef EVENKEEL_COMM_BASE_NOTIFICATION_H_
#define EVENKEEL_COMM_BASE_NOTIFICATION_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"

namespace evenkeel::internal {

class Notification {
 public:
  Notification() = default;
  ~Notification() { const absl::MutexLock lock(&mutex_); }  // Notify() has returned then.
  Notification(const Notification&) = delete;
  Notification& operator=(const Notification&) = delete;

  void Notify() {
    const absl::MutexLock lock(&mutex_);
    was_notified_ = true;
  }

  bool HasBeenNotified() const {
    const absl::MutexLock lock(&mutex_);
    return was_notified_;
  }

  // Returns false if not notified by the deadline, a time of SteadyNow().
  bool WaitUntil(absl::Time deadline) const {
    const absl::MutexLock lock(&mutex_);
    return AwaitUntil(mutex_, absl::Condition(&was_notified_), deadline);
  }

 private:
  mutable absl::Mutex mutex_;
  bool was_notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_NOTIFICATION_H_
