#include "evenkeel/join/steps/phase_clock.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/waits.h"

namespace evenkeel {
namespace {

void Sleep(int ms) { absl::SleepFor(absl::Milliseconds(ms)); }

TEST(PhaseClockTest, TheFirstIntervalBeginsWithTheFirstReduction) {
  PhaseClock clock;
  clock.Enter(StepPhase::kForward);
  clock.EndReduction();
  EXPECT_FALSE(clock.Take().has_value());
  clock.EndReduction();
  EXPECT_TRUE(clock.Take().has_value());
  EXPECT_FALSE(clock.Take().has_value());
}

TEST(PhaseClockTest, TimeBelongsToThePhaseAndWaitsToNone) {
  PhaseClock clock;
  clock.EndReduction();
  EXPECT_EQ(clock.Enter(StepPhase::kInput), StepPhase::kOutside);
  Sleep(10);
  EXPECT_EQ(clock.Enter(StepPhase::kForward), StepPhase::kInput);
  {
    const internal::CountedWait outer, inner;
    Sleep(30);
  }
  Sleep(20);
  clock.BeginBackward();
  clock.BeginBackward();
  Sleep(40);
  clock.EndReduction();
  const std::optional<PhaseTimes> times = clock.Take();
  ASSERT_TRUE(times.has_value());
  // A machine that is busy adds to each sleep.
  EXPECT_GE(times->busy(StepPhase::kInput), 10'000);
  EXPECT_GE(times->busy(StepPhase::kForward), 19'990);
  EXPECT_GE(times->busy(StepPhase::kBackward), 39'990);
  EXPECT_GE(times->waited_us, 29'990);
  EXPECT_LT(times->waited_us + times->busy(StepPhase::kForward), times->total_us() - 49'000);
}

TEST(PhaseClockTest, IntervalsAddUpUntilTheyAreTaken) {
  PhaseClock clock;
  clock.EndReduction({.first_us = 1000, .last_us = 1000});  // No interval has begun.
  for (int i = 0; i < 2; ++i) {
    clock.Enter(StepPhase::kOptimizer);
    Sleep(10);
    clock.EndReduction({.first_us = 2, .last_us = 30});
  }
  const std::optional<PhaseTimes> times = clock.Take();
  EXPECT_GE(times->busy(StepPhase::kOptimizer), 19'990);
  EXPECT_EQ(times->ready, (BucketsReady{.first_us = 4, .last_us = 60}));
}

TEST(PhaseClockTest, BackwardBeginsOnceInAnInterval) {
  PhaseClock clock;
  clock.EndReduction();
  EXPECT_EQ(clock.backward_began(), absl::InfiniteFuture());
  clock.Enter(StepPhase::kForward);
  const absl::Time before = SteadyNow();
  clock.BeginBackward();
  const absl::Time began = clock.backward_began();
  EXPECT_GE(began, before);
  Sleep(1);
  clock.BeginBackward();
  clock.Enter(clock.Enter(StepPhase::kSaving));  // Inside of backward.
  EXPECT_EQ(clock.backward_began(), began);
  EXPECT_EQ(clock.phase(), StepPhase::kBackward);
  clock.EndReduction();
  EXPECT_EQ(clock.backward_began(), absl::InfiniteFuture());
}

TEST(PhaseClockTest, BucketsAreReadyWithinTheInterval) {
  PhaseClock clock;
  clock.EndReduction();
  Sleep(1);
  clock.EndReduction({.first_us = -5, .last_us = int64_t{1} << 60});
  const std::optional<PhaseTimes> times = clock.Take();
  EXPECT_EQ(times->ready, (BucketsReady{.first_us = 0, .last_us = times->total_us()}));
}

TEST(PhaseClockTest, ResetDropsTheInterval) {
  PhaseClock clock;
  clock.EndReduction();
  clock.EndReduction();
  clock.Reset();
  EXPECT_FALSE(clock.Take().has_value());
  Sleep(300);
  clock.EndReduction();
  EXPECT_FALSE(clock.Take().has_value());
  clock.EndReduction();
  EXPECT_LT(clock.Take()->total_us(), 300'000);
}

TEST(PhaseClockTest, AnotherThreadMayBeginBackward) {
  PhaseClock clock;
  clock.EndReduction();
  clock.Enter(StepPhase::kForward);
  std::thread engine([&] {
    clock.BeginBackward();
    Sleep(20);
  });
  engine.join();
  clock.EndReduction();
  const std::optional<PhaseTimes> times = clock.Take();
  EXPECT_GE(times->busy(StepPhase::kBackward), 19'990);
  EXPECT_EQ(times->waited_us, 0);
}

}  // namespace
}  // namespace evenkeel
