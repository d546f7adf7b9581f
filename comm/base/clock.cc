#include "evenkeel/comm/base/clock.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/warn.h"

namespace evenkeel {
namespace {

#ifdef NDEBUG
// Debian's Abseil is compiled without NDEBUG, so at each lock it searches for mutexes that were
// taken in a cycle, which is almost half of the instructions of a small collective, and ends the
// process if there are any. Debian 13's does not learn of the end of mutexes in code with NDEBUG,
// and takes those that have one address after the other for one. Abseil with NDEBUG does not
// search. Tests do with Debian 12's (tools/build_defs/lock_cycles.cc), which finds only true
// cycles.
[[maybe_unused]] const bool looks_for_no_cycles = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();
#endif

constexpr absl::Duration kShortestPause = absl::Microseconds(100),
                         kLongestPause = absl::Milliseconds(10);

absl::Time Monotonic() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

// A wait in progress. Its mutex is held, except inside of Abseil's wait.
struct Waiting {
  absl::Mutex* mutex;
  absl::CondVar* signal;  // Null: it waits for a condition.
  size_t at = 0;
  bool looks_again = false;  // Guarded by *mutex.
};

// The waits of this process. Its lock is taken with the mutexes of waits held, so it only tries to
// take those.
class Waits {
 public:
  void Add(Waiting& waiting) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_watched_) is_watched_ = StartWatching();
    waiting.at = all_.size();
    all_.push_back(&waiting);
  }

  void Remove(const Waiting& waiting) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_[waiting.at] = all_.back();
    all_[waiting.at]->at = waiting.at;
    all_.pop_back();
  }

 private:
  // Returns false if the process may have no more threads; the next wait tries again.
  bool StartWatching() {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, &Waits::Watch, this) != 0) return false;
    pthread_detach(thread);
    return true;
  }

  // Reads a timer that never expires: the read fails whenever the clock is set.
  static void* Watch(void* waits) {
    internal::ThisThreadIsTheLibrarys();
    sigset_t signals;
    sigfillset(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // The program's threads handle them.
    const int timer = timerfd_create(CLOCK_REALTIME, TFD_CLOEXEC);
    itimerspec never{};
    never.it_value.tv_sec = std::numeric_limits<time_t>::max();
    int error = 0;
    if (timer < 0 ||
        timerfd_settime(timer, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &never, nullptr) != 0)
      error = errno;
    while (error == 0) {
      uint64_t expirations = 0;
      if (read(timer, &expirations, sizeof(expirations)) >= 0 || errno == EINTR) continue;
      if (errno == ECANCELED) {
        static_cast<Waits*>(waits)->WakeAll();
      } else {
        error = errno;
      }
    }
    internal::Warn(nullptr,
                   absl::StrCat("the system does not report when its clock is set (timerfd: ",
                                strerror(error), "); a clock that is set back prolongs waits"));
    if (timer >= 0) close(timer);
    return nullptr;
  }

  void WakeAll() {
    absl::Duration pause = kShortestPause;
    for (std::set<Waiting*> left = Copy(); !left.empty(); left = TryToWake(left)) {
      absl::SleepFor(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }

  std::set<Waiting*> Copy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {all_.begin(), all_.end()};
  }

  // Returns those that still wait, with a mutex that another thread holds.
  std::set<Waiting*> TryToWake(const std::set<Waiting*>& due) {
    std::set<Waiting*> left;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Waiting* const waiting : all_) {
      if (!due.contains(waiting)) continue;
      if (!waiting->mutex->TryLock()) {
        left.insert(waiting);
        continue;
      }
      waiting->looks_again = true;
      if (waiting->signal != nullptr) waiting->signal->SignalAll();
      waiting->mutex->Unlock();
    }
    return left;
  }

  std::mutex mutex_;
  bool is_watched_ = false;
  std::vector<Waiting*> all_;
};

// Leaked, because threads may wait until the process ends. A child of fork() has none of the
// threads that wait or watch, so it begins anew.
std::atomic<Waits*> the_waits{nullptr};

Waits& TheWaits() {
  Waits* waits = the_waits.load();
  if (waits != nullptr) return *waits;
  static const int handler = pthread_atfork(nullptr, nullptr, [] { the_waits.store(nullptr); });
  (void)handler;
  auto* const made = new Waits();
  if (the_waits.compare_exchange_strong(waits, made)) return *made;
  delete made;
  return *waits;
}

class ScopedWait {
 public:
  explicit ScopedWait(Waiting& waiting) : waits_(TheWaits()), waiting_(waiting) {
    waits_.Add(waiting_);
  }
  ~ScopedWait() { waits_.Remove(waiting_); }
  ScopedWait(const ScopedWait&) = delete;
  ScopedWait& operator=(const ScopedWait&) = delete;

 private:
  Waits& waits_;
  Waiting& waiting_;
};

// Returns by how much the time of day is ahead of the monotonic clock.
absl::Duration Ahead() {
  const absl::Time before = Monotonic();
  const absl::Time now = absl::Now();
  return now - (before + (Monotonic() - before) / 2);
}

// The rest of a wait, which releases its mutex even if the deadline has passed.
absl::Duration LeftUntil(absl::Time deadline) {
  return std::max(deadline - SteadyNow(), absl::ZeroDuration());
}

}  // namespace

absl::Time SteadyNow() {
  static const absl::Duration ahead = Ahead();
  return Monotonic() + ahead;
}

bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) {
    mutex.Await(condition);
    return true;
  }
  if (condition.Eval()) return true;
  Waiting waiting{.mutex = &mutex, .signal = nullptr};
  const ScopedWait scope(waiting);
  const auto ends = [&] { return waiting.looks_again || condition.Eval(); };
  do {
    waiting.looks_again = false;
    mutex.AwaitWithTimeout(absl::Condition(&ends), LeftUntil(deadline));
    if (condition.Eval()) return true;
  } while (SteadyNow() < deadline);
  return false;
}

bool WaitUntil(absl::CondVar& signal, absl::Mutex& mutex, absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) {
    signal.Wait(&mutex);
    return false;
  }
  Waiting waiting{.mutex = &mutex, .signal = &signal};
  const ScopedWait scope(waiting);
  return signal.WaitWithTimeout(&mutex, LeftUntil(deadline)) && SteadyNow() >= deadline;
}

}  // namespace evenkeel
