#include "evenkeel/trainer/report/step_series.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

namespace evenkeel {
namespace {

TEST(StepSeriesTest, KeepsEveryStepOfAShortRun) {
  StepSeries series;
  for (int step = 0; step < 2000; ++step) series.Add({.step = step, .loss = 1.0 * step});
  ASSERT_EQ(series.points().size(), 2000);
  EXPECT_EQ(series.points()[1234].step, 1234);
  EXPECT_EQ(series.points()[1234].loss, 1234);
}

TEST(StepSeriesTest, IsBoundedAndCountsEveryStepOnce) {
  for (const int64_t steps : {2001, 3999, 4000, 4001, 123457, 1000000}) {
    SCOPED_TRACE(steps);
    StepSeries series;
    for (int64_t step = 0; step < steps; ++step)
      series.Add({.step = step, .loss = 2, .samples = 1.0 * step});
    EXPECT_LE(series.points().size(), StepSeries::kMaxPoints);
    EXPECT_GE(series.points().size(), StepSeries::kMaxPoints / 2);
    int64_t next = 0;
    double sum = 0;
    for (const StepPoint& point : series.points()) {
      EXPECT_EQ(point.step, next);
      next += point.count;
      sum += point.samples * static_cast<double>(point.count);
      EXPECT_EQ(point.loss, 2);
    }
    EXPECT_EQ(next, steps);
    EXPECT_NEAR(sum, 0.5 * static_cast<double>(steps * (steps - 1)), 1e-6 * sum);
  }
}

TEST(StepSeriesTest, LeavesUnknownValuesOutOfMeans) {
  StepSeries series;
  for (int step = 0; step < 4000; ++step)
    series.Add({.step = step, .loss = step % 2 == 0 ? 3.0 : kUnknown});
  for (const StepPoint& point : series.points()) EXPECT_EQ(point.loss, 3.0);
  EXPECT_TRUE(std::isnan(series.points()[0].accuracy));
}

TEST(StepSeriesTest, ARepeatedStepReplacesWhatCameFromItOn) {
  StepSeries series;
  for (int step = 0; step < 5; ++step) series.Add({.step = step, .loss = 1});
  series.Add({.step = 3, .loss = 7});
  ASSERT_EQ(series.points().size(), 4);
  EXPECT_EQ(series.points()[2].loss, 1);
  EXPECT_EQ(series.points()[3].loss, 7);
}

}  // namespace
}  // namespace evenkeel
