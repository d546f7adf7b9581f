#include "evenkeel/comm/control/watchdog.h"

#include <utility>

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

Watchdog::Watchdog(std::function<absl::Duration()> look) : look_(std::move(look)) {}

Watchdog::~Watchdog() { Stop(); }

absl::Status Watchdog::Start() {
  EK_ASSIGN_OR_RETURN(thread_, StartThread("the watchdog", [this] { Run(); }));
  return absl::OkStatus();
}

void Watchdog::Wake() {
  absl::MutexLock lock(&mutex_);
  is_woken_ = true;
}

void Watchdog::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stops_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Run() {
  ThisThreadIsTheLibrarys();
  const auto has_news = [this]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_woken_ || stops_; };
  absl::MutexLock lock(&mutex_);
  while (!stops_) {
    is_woken_ = false;
    mutex_.Unlock();
    const absl::Duration pause = look_();
    mutex_.Lock();
    AwaitFor(mutex_, absl::Condition(&has_news), pause);
  }
}

}  // namespace evenkeel::internal
