#include "evenkeel/comm/control/watchdog.h"

#include <atomic>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(WatchdogTest, LooksAtOnceAndAgain) {
  std::atomic<int> looks = 0;
  absl::Notification thrice;
  Watchdog watchdog([&] {
    if (++looks == 3) thrice.Notify();
    return absl::Milliseconds(1);
  });
  EXPECT_TRUE(watchdog.Start().ok());
  thrice.WaitForNotification();
  watchdog.Stop();
  const int before = looks;
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(looks, before) << "it has stopped";
}

TEST(WatchdogTest, WakesFromALongSleep) {
  std::atomic<int> looks = 0;
  absl::Notification first, second;
  Watchdog watchdog([&] {
    ++looks;
    if (looks == 1) first.Notify();
    if (looks == 2) second.Notify();
    return absl::Hours(1);
  });
  EXPECT_TRUE(watchdog.Start().ok());
  first.WaitForNotification();
  watchdog.Wake();
  second.WaitForNotification();
}

TEST(WatchdogTest, AWakeDuringALookIsNotLost) {
  std::atomic<int> looks = 0;
  absl::Notification second;
  Watchdog* self = nullptr;
  absl::Notification known;
  Watchdog watchdog([&] {
    known.WaitForNotification();
    if (++looks == 1) self->Wake();
    if (looks == 2) second.Notify();
    return absl::Hours(1);
  });
  self = &watchdog;
  EXPECT_TRUE(watchdog.Start().ok());
  known.Notify();
  second.WaitForNotification();
}

TEST(WatchdogTest, StopsFromALongSleepAndTwice) {
  Watchdog watchdog([] { return absl::InfiniteDuration(); });
  EXPECT_TRUE(watchdog.Start().ok());
  watchdog.Stop();
  watchdog.Stop();
}

TEST(WatchdogTest, MayGoWithoutEverHavingLooked) {
  Watchdog watchdog([]() -> absl::Duration {
    ADD_FAILURE();
    return absl::Seconds(1);
  });
  watchdog.Wake();
}

}  // namespace
}  // namespace evenkeel::internal
