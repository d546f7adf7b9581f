#include "evenkeel/join/steps/phase_clock.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/waits.h"

namespace evenkeel {
namespace {

int64_t NowNs() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

StepPhase PhaseClock::Enter(StepPhase next) {
  absl::MutexLock lock(&mutex_);
  Charge();
  // A phase inside of backward ends with backward again.
  const bool begins =
      next == StepPhase::kBackward && phase_.load(std::memory_order_relaxed) == StepPhase::kForward;
  if (begins) backward_began_ = SteadyNow();
  return phase_.exchange(next, std::memory_order_relaxed);
}

absl::Time PhaseClock::backward_began() const {
  absl::MutexLock lock(&mutex_);
  return backward_began_;
}

void PhaseClock::EndReduction(const BucketsReady& ready) {
  absl::MutexLock lock(&mutex_);
  Charge();
  phase_.store(StepPhase::kOutside, std::memory_order_relaxed);
  if (std::exchange(is_running_, true)) {
    if (!ended_.has_value()) ended_.emplace();
    PhaseTimes interval{.waited_us = waited_ns_ / 1000};
    for (size_t i = 0; i < busy_ns_.size(); ++i) interval.busy_us[i] = busy_ns_[i] / 1000;
    // `ready` is rounded apart from the interval.
    const int64_t most = interval.total_us();
    interval.ready = {.first_us = std::clamp<int64_t>(ready.first_us, 0, most),
                      .last_us = std::clamp<int64_t>(ready.last_us, 0, most)};
    *ended_ += interval;
  }
  busy_ns_ = {};
  waited_ns_ = 0;
  backward_began_ = absl::InfiniteFuture();
  owner_ = std::this_thread::get_id();
  since_ns_ = NowNs();
  waited_before_ns_ = internal::NanosWaited();
}

void PhaseClock::Reset() {
  absl::MutexLock lock(&mutex_);
  is_running_ = false;
  ended_.reset();
}

std::optional<PhaseTimes> PhaseClock::Take() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(ended_, std::nullopt);
}

void PhaseClock::Charge() {
  if (!is_running_) return;
  const int64_t now = NowNs();
  const int64_t took = now - std::exchange(since_ns_, now);
  int64_t waited = 0;
  if (std::this_thread::get_id() == owner_) {
    waited = internal::NanosWaited();
    waited -= std::exchange(waited_before_ns_, waited);
    waited = std::min(waited, took);  // The rest was in a phase that another thread has ended.
  }
  waited_ns_ += waited;
  busy_ns_[static_cast<size_t>(phase_.load(std::memory_order_relaxed))] += took - waited;
}

}  // namespace evenkeel
