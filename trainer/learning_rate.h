// The learning rate of a step.
//
//   LearningRate({.base = 4e-3, .decay = Decay::kLinear, .total_steps = 1876}, step)
//
// Batch norm's running statistics follow the weights with a delay: without a decay the test accuracy of `cnn` jumps by
// several percent from epoch to epoch, with it the last step's is the best.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_LEARNING_RATE_H_
#define EVENKEEL_TRAINER_LEARNING_RATE_H_

#include <algorithm>
#include <cstdint>

namespace evenkeel {

enum class Decay {
  kNone,
  kLinear,  // In equal steps from `base` towards zero, which the step after the last one would have.
};

struct LearningRateSchedule {
  double base = 0;
  Decay decay = Decay::kNone;
  int64_t total_steps = 0;
};

// `step` counts the group's steps from 0.
inline double LearningRate(const LearningRateSchedule& schedule, int64_t step) {
  if (schedule.decay == Decay::kNone || schedule.total_steps <= 0) return schedule.base;
  const int64_t left = std::max<int64_t>(0, schedule.total_steps - step);
  return schedule.base * static_cast<double>(left) / static_cast<double>(schedule.total_steps);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LEARNING_RATE_H_
