#include "evenkeel/join/steps/phase_clock.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "absl/time/clock.h"
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
  clock.EndReduction();
  for (int i = 0; i < 2; ++i) {
    clock.Enter(StepPhase::kOptimizer);
    Sleep(10);
    clock.EndReduction();
  }
  EXPECT_GE(clock.Take()->busy(StepPhase::kOptimizer), 19'990);
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
