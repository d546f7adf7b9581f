// A thread that calls a function periodically.
//
//   Watchdog watchdog([&] { Look(); return absl::Seconds(1); });
//   watchdog.Start();     // calls it at once, then again after the returned duration
//   watchdog.Wake();      // calls it now
//   watchdog.Stop();      // no call runs after it returns
//
// Threads: Wake() from any thread, also from the function. Start(), Stop() and destruction by the
//          owner, not by the function.

#ifndef EVENKEEL_COMM_CONTROL_WATCHDOG_H_
#define EVENKEEL_COMM_CONTROL_WATCHDOG_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace evenkeel::internal {

class Watchdog {
 public:
  // `look` returns the duration of the next sleep.
  explicit Watchdog(std::function<absl::Duration()> look);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // ResourceExhausted: its thread cannot start.
  absl::Status Start();
  // Has no effect before Start().
  void Wake();
  void Stop();

 private:
  void Run();

  const std::function<absl::Duration()> look_;
  absl::Mutex mutex_;
  bool is_woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_WATCHDOG_H_
