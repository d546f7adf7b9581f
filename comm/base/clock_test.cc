#include "evenkeel/comm/base/clock.h"

#include <errno.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <new>
#include <thread>

#include "absl/base/config.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

// By so many seconds the time of day of this process is ahead of the kernel's; less if negative.
std::atomic<int64_t> seconds_ahead{0};

// The timer whose reads fail when the clock is set, and a pipe whose bytes stand for that.
std::atomic<int> watched_timer{-1};
int settings[2] = {-1, -1};

extern "C" {
int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int status = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += seconds_ahead;
  return status;
}

int gettimeofday(timeval* time, void* zone) noexcept {
  const int status = static_cast<int>(syscall(SYS_gettimeofday, time, zone));
  time->tv_sec += seconds_ahead;
  return status;
}

int timerfd_settime(int timer, int flags, const itimerspec* value, itimerspec* old) noexcept {
  if (flags == (TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET)) watched_timer = timer;
  return static_cast<int>(syscall(SYS_timerfd_settime, timer, flags, value, old));
}

ssize_t read(int fd, void* to, size_t bytes) {
  if (fd < 0 || fd != watched_timer) return syscall(SYS_read, fd, to, bytes);
  char byte = 0;
  if (syscall(SYS_read, settings[0], &byte, 1) != 1) return -1;
  errno = ECANCELED;
  return -1;
}
// The call of code with checks of buffer sizes (_FORTIFY_SOURCE).
ssize_t __read_chk(int fd, void* to, size_t bytes, size_t) { return read(fd, to, bytes); }
}

namespace evenkeel {
namespace {

constexpr int64_t kHour = 3600;
constexpr absl::Duration kShort = absl::Milliseconds(100), kLong = absl::Seconds(60);

// Abseil's waits end when the kernel's clock shows a time that they compute from this process's
// clock when they begin. So a wait that begins while this one is an hour behind is one during which
// the kernel's clock is set an hour forward, and it ends at once; a wait that begins while this one
// is an hour ahead lasts an hour longer.
class ClockTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(pipe(settings), 0); }
  ~ClockTest() override { seconds_ahead = 0; }

  // Expects `wait` to end at its deadline, although the clock is set back meanwhile.
  void ExpectNotProlonged(const std::function<void(absl::Time deadline)>& wait) {
    seconds_ahead = kHour;
    std::thread setter;
    {
      const absl::MutexLock lock(&mutex_);
      setter = std::thread([this] {
        { const absl::MutexLock in_the_wait(&mutex_); }
        seconds_ahead = 0;
        EXPECT_EQ(write(settings[1], "", 1), 1);  // As the kernel reports it.
      });
      const absl::Time start = SteadyNow();
      wait(start + kShort);
      EXPECT_GE(SteadyNow() - start, kShort);
      EXPECT_LT(SteadyNow() - start, kLong);
    }
    setter.join();
  }

  absl::Mutex mutex_;
  absl::CondVar signal_;
  bool is_done_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST_F(ClockTest, SteadyTimeGoesOnWhenTheClockIsSet) {
  const absl::Time before = SteadyNow();
  for (const int64_t ahead : {kHour, -kHour}) {
    seconds_ahead = ahead;
    EXPECT_GE(SteadyNow(), before);
    EXPECT_LT(SteadyNow() - before, kLong);
  }
}

TEST_F(ClockTest, AWaitEndsAtItsDeadline) {
  const absl::MutexLock lock(&mutex_);
  const absl::Time start = SteadyNow();
  EXPECT_FALSE(AwaitFor(mutex_, absl::Condition(&is_done_), kShort));
  EXPECT_GE(SteadyNow() - start, kShort);
  EXPECT_FALSE(AwaitUntil(mutex_, absl::Condition(&is_done_), absl::InfinitePast()));
  is_done_ = true;
  EXPECT_TRUE(AwaitUntil(mutex_, absl::Condition(&is_done_), absl::InfinitePast()));
  EXPECT_TRUE(AwaitUntil(mutex_, absl::Condition(&is_done_), absl::InfiniteFuture()));
}

TEST_F(ClockTest, AClockThatIsSetForwardEndsNoWait) {
  seconds_ahead = -kHour;
  std::thread setter;
  {
    const absl::MutexLock lock(&mutex_);
    // Since 20230802 only waits with a deadline follow the clock, those with a timeout do not.
    EXPECT_FALSE(mutex_.AwaitWithDeadline(absl::Condition(&is_done_), absl::Now() + kLong))
        << "Abseil's waits follow the clock no longer: ours can be simpler";
    setter = std::thread([this] {
      absl::SleepFor(kShort);
      const absl::MutexLock in_the_wait(&mutex_);
      is_done_ = true;
    });
    EXPECT_TRUE(AwaitFor(mutex_, absl::Condition(&is_done_), kLong));
    const absl::Time deadline = SteadyNow() + kShort;
    EXPECT_TRUE(!WaitUntil(signal_, mutex_, deadline) || SteadyNow() >= deadline);
  }
  setter.join();
}

TEST_F(ClockTest, AClockThatIsSetBackProlongsNoWait) {
  ExpectNotProlonged([&](absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    EXPECT_FALSE(AwaitUntil(mutex_, absl::Condition(&is_done_), deadline));
  });
}

TEST_F(ClockTest, AClockThatIsSetBackProlongsNoWaitForASignal) {
  ExpectNotProlonged([&](absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (!WaitUntil(signal_, mutex_, deadline)) {
    }
  });
}

// Takes two locks, which then end.
void Nest(void* first, void* second) {
  auto* const outer = new (first) absl::Mutex;
  auto* const inner = new (second) absl::Mutex;
  {
    const absl::MutexLock lock(outer);
    const absl::MutexLock nested(inner);
  }
  inner->~Mutex();
  outer->~Mutex();
}

TEST(MutexTest, LocksAtTheAddressesOfEndedOnesHaveAnyOrder) {
#if !defined(NDEBUG) || ABSL_LTS_RELEASE_VERSION < 20230802
  GTEST_SKIP() << "only Abseil since 20230802, as in Debian 13, does not learn of mutexes that end "
                  "in code with NDEBUG";
#endif
  alignas(absl::Mutex) char memory[2][sizeof(absl::Mutex)];
  EXPECT_GT(SteadyNow(), absl::InfinitePast());  // As all users of the library.
  Nest(memory[0], memory[1]);
  Nest(memory[1], memory[0]);
}

TEST(MutexDeathTest, InTestsACycleOfLocksEndsTheProcess) {
#if defined(__SANITIZE_THREAD__) || ABSL_LTS_RELEASE_VERSION >= 20230802
  GTEST_SKIP() << "only Debian 12's Abseil finds no cycles where there are none";
#endif
  const auto lock_in_a_cycle = [] {
    absl::Mutex mutexes[2];
    for (const int first : {0, 1}) {
      const absl::MutexLock outer(&mutexes[first]);
      const absl::MutexLock inner(&mutexes[1 - first]);
    }
  };
  EXPECT_DEATH(lock_in_a_cycle(), "deadlock");
}

TEST_F(ClockTest, AChildOfForkWaitsToo) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer allows no threads in a child of fork()";
#endif
  absl::Mutex of_parent;
  bool ends = false;
  std::thread waiting([&] {
    const absl::MutexLock lock(&of_parent);
    EXPECT_TRUE(AwaitFor(of_parent, absl::Condition(&ends), kLong));
  });
  absl::SleepFor(kShort);
  const pid_t child = fork();
  if (child == 0) {
    EXPECT_EQ(pipe(settings), 0);  // The parent reads the other one.
    ExpectNotProlonged([&](absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      EXPECT_FALSE(AwaitUntil(mutex_, absl::Condition(&is_done_), deadline));
    });
    _exit(HasFailure() ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  {
    const absl::MutexLock lock(&of_parent);
    ends = true;
  }
  waiting.join();
}

}  // namespace
}  // namespace evenkeel
