// A thread that looks at something now and then and sleeps in between.
//
//   Watchdog watchdog([&] { Look(); return absl::Seconds(1); });
//   watchdog.Start();     // looks at once, then again after what it answers
//   watchdog.Wake();      // looks now
//   watchdog.Stop();      // no look after it returns
//
// Threads: Wake() from any thread, also from a look. Start(), Stop() and destruction by the owner, not by a look.

#ifndef EVENKEEL_COMM_INTERNAL_WATCHDOG_H_
#define EVENKEEL_COMM_INTERNAL_WATCHDOG_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace evenkeel::internal {

class Watchdog {
 public:
  // `look` answers how long to sleep.
  explicit Watchdog(std::function<absl::Duration()> look);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void Start();
  // Before Start() it does nothing.
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

#endif  // EVENKEEL_COMM_INTERNAL_WATCHDOG_H_
