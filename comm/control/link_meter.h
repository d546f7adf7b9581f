// Counts the traffic of a link, and the processor time of its thread.
//
//   meter.Sent(message, bytes);  meter.Received(message, bytes);
//   meter.OnLinksThread();  // on the link's thread, at any frequency
//   ControlCounters counters = meter.Read();
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_CONTROL_LINK_METER_H_
#define EVENKEEL_COMM_CONTROL_LINK_METER_H_

#include <pthread.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/control/messages.h"

namespace evenkeel::internal {

class LinkMeter {
 public:
  // Count one ToHub or ToRank, unless it is a heartbeat.
  void Sent(const auto& message, size_t bytes) {
    if (IsBeat(message)) return;
    absl::MutexLock lock(&mutex_);
    ++counters_.messages_sent;
    counters_.bytes_sent += static_cast<int64_t>(bytes);
  }
  void Received(const auto& message, size_t bytes) {
    if (IsBeat(message)) return;
    absl::MutexLock lock(&mutex_);
    ++counters_.messages_received;
    counters_.bytes_received += static_cast<int64_t>(bytes);
  }
  // Registers the calling thread as the link's.
  void OnLinksThread() {
    absl::MutexLock lock(&mutex_);
    if (!has_clock_) has_clock_ = pthread_getcpuclockid(pthread_self(), &clock_) == 0;
  }
  ControlCounters Read() const {
    absl::MutexLock lock(&mutex_);
    timespec time;
    // The clock of an ended thread cannot be read; its last value remains.
    if (has_clock_ && clock_gettime(clock_, &time) == 0)
      counters_.cpu_time = absl::DurationFromTimespec(time);
    return counters_;
  }

 private:
  mutable absl::Mutex mutex_;
  mutable ControlCounters counters_ ABSL_GUARDED_BY(mutex_);
  bool has_clock_ ABSL_GUARDED_BY(mutex_) = false;
  clockid_t clock_ ABSL_GUARDED_BY(mutex_) = 0;  // The clock of the link's thread.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_LINK_METER_H_
