// What people and dashboards want to know of a step, out of its facts.
//
//   const StepNumbers numbers = NumbersOf(facts, data.train->predictions_per_sample());
//   numbers.predictions_per_second;            // images, or tokens
//   BitsOf(numbers.loss);                      // per prediction
//
// Values of a step that this rank had no batch for are NaN, but for the group's speed.
//
// Units:   ratios go from 0 to 1.
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_STEP_NUMBERS_H_
#define EVENKEEL_TRAINER_STEP_NUMBERS_H_

#include <cstdint>
#include <limits>
#include <numbers>

#include "absl/time/time.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

struct StepNumbers {
  double loss = std::numeric_limits<double>::quiet_NaN();  // Of this rank's batch, as is the next one.
  double accuracy = std::numeric_limits<double>::quiet_NaN();
  double exposed_ms = std::numeric_limits<double>::quiet_NaN();     // Communication that backward did not hide,
  double exposed_ratio = std::numeric_limits<double>::quiet_NaN();  // and its part of the step.
  double step_ms = std::numeric_limits<double>::quiet_NaN();
  double predictions_per_second = std::numeric_limits<double>::quiet_NaN();  // Of all ranks.
};

inline StepNumbers NumbersOf(const StepFacts& facts, int64_t predictions_per_sample) {
  StepNumbers numbers;
  const bool has_time = facts.took > absl::ZeroDuration();
  if (has_time) {
    const double predictions = static_cast<double>(facts.samples) * static_cast<double>(predictions_per_sample);
    numbers.step_ms = absl::ToDoubleMilliseconds(facts.took);
    numbers.predictions_per_second = predictions / absl::ToDoubleSeconds(facts.took);
  }
  if (!facts.own.has_value() || facts.own->predictions == 0) return numbers;
  numbers.loss = facts.own->loss_mean;
  numbers.accuracy = static_cast<double>(facts.own->correct) / static_cast<double>(facts.own->predictions);
  numbers.exposed_ms = absl::ToDoubleMilliseconds(facts.sync);
  if (has_time) numbers.exposed_ratio = absl::FDivDuration(facts.sync, facts.took);
  return numbers;
}

// What a loss in natural units, as all of ours are, means in bits.
inline double BitsOf(double loss) { return loss / std::numbers::ln2; }

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_STEP_NUMBERS_H_
