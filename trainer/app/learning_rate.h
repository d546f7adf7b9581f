// The learning rate of a step.
//
//   LearningRate({.base = 4e-3, .decay = Decay::kLinear, .total_steps = 1876}, step)
//
// Batch norm's running statistics follow the weights with a delay: without a decay the test
// accuracy of `cnn` jumps by several percent from epoch to epoch, with it the last step's is the
// best.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_APP_LEARNING_RATE_H_
#define EVENKEEL_TRAINER_APP_LEARNING_RATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace evenkeel {

enum class Decay {
  kNone,
  kLinear,  // In equal steps from `base` to zero, which is reached one step after the last.
  kCosine,  // Half a cosine from `base` down to a tenth of it.
};

struct LearningRateSchedule {
  double base = 0;
  Decay decay = Decay::kNone;
  int64_t warmup = 0;  // Number of first steps in which the rate grows in equal steps up to `base`;
                       // the decay begins after them.
  int64_t total_steps = 0;
};

inline constexpr double kCosineFloor = 0.1;

// Returns the learning rate of `step`, one of the group's steps, counted from 0.
inline double LearningRate(const LearningRateSchedule& schedule, int64_t step) {
  if (step < schedule.warmup)
    return schedule.base * static_cast<double>(step + 1) / (schedule.warmup + 1.0);
  const int64_t steps = schedule.total_steps - schedule.warmup;
  if (schedule.decay == Decay::kNone || steps <= 0) return schedule.base;
  const double left = std::max<double>(0, schedule.total_steps - step) / static_cast<double>(steps);
  if (schedule.decay == Decay::kLinear) return schedule.base * left;
  return schedule.base *
         (kCosineFloor + (1 - kCosineFloor) * (1 - std::cos(std::numbers::pi * left)) / 2);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_LEARNING_RATE_H_
