// A curve of bounded size over any number of steps: when it has too many points, each two
// neighbours are merged.
//
//   StepSeries series;
//   series.Add({.step = 0, .loss = 2.3});        // a million times
//   series.points();  // at most 2000: means over equally many steps, except the last one
//
// Values that are NaN in some of the steps are means over the others.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TRAINER_REPORT_STEP_SERIES_H_
#define EVENKEEL_TRAINER_REPORT_STEP_SERIES_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

class StepSeries {
 public:
  static constexpr size_t kMaxPoints = 2000;

  // Continues the points of another series.
  explicit StepSeries(std::vector<StepPoint> points = {}) : points_(std::move(points)) {
    if (!points_.empty()) stride_ = points_.front().count;
  }

  // Adds a point, whose `count` is 1. Steps are in order; a repeated step (a rank was lost)
  // replaces the points from it on that were not merged yet.
  void Add(const StepPoint& point);
  const std::vector<StepPoint>& points() const { return points_; }

 private:
  void Halve();

  std::vector<StepPoint> points_;
  int64_t stride_ = 1;  // Steps per point.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_STEP_SERIES_H_
