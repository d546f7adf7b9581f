#include "evenkeel/comm/control/link_meter.h"

#include <pthread.h>

namespace evenkeel::internal {

void LinkMeter::Sent(size_t bytes) {
  absl::MutexLock lock(&mutex_);
  ++counters_.messages_sent;
  counters_.bytes_sent += static_cast<int64_t>(bytes);
}

void LinkMeter::Received(size_t bytes) {
  absl::MutexLock lock(&mutex_);
  ++counters_.messages_received;
  counters_.bytes_received += static_cast<int64_t>(bytes);
}

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
