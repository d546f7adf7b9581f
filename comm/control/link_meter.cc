#include "evenkeel/comm/control/link_meter.h"

#include <pthread.h>

namespace evenkeel::internal {

void LinkMeter::OnLinksThread() {
  absl::MutexLock lock(&mutex_);
  if (!has_clock_) has_clock_ = pthread_getcpuclockid(pthread_self(), &clock_) == 0;
}

ControlCounters LinkMeter::Read() const {
  absl::MutexLock lock(&mutex_);
  timespec time;
  // The clock of an ended thread cannot be read; its last value remains.
  if (has_clock_ && clock_gettime(clock_, &time) == 0)
    counters_.cpu_time = absl::DurationFromTimespec(time);
  return counters_;
}

}  // namespace evenkeel::internal
