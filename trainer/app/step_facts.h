// A step of the group as seen by one of its ranks, and numbers of it for output and dashboards.
//
//   const StepNumbers numbers = NumbersOf(facts, data.train->predictions_per_sample());
//   numbers.predictions_per_second;            // images, or tokens
//   BitsOf(numbers.loss);                      // per prediction
//
// In steps for which this rank had no batch all values but the group's speed are NaN.
//
// Units:   ratios go from 0 to 1.
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_APP_STEP_FACTS_H_
#define EVENKEEL_TRAINER_APP_STEP_FACTS_H_

#include <cstdint>
#include <numbers>
#include <optional>

#include "absl/time/time.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

struct StepFacts {
  int epoch = 0;
  int64_t step = 0;     // The group's.
  int active = 0;       // Number of ranks with a batch.
  int64_t samples = 0;  // In all batches.
  double learning_rate = 0;
  double loss_scale = 0;           // 0: losses are not scaled.
  std::optional<BatchResult> own;  // None: this rank is exhausted.
  int64_t own_samples = 0;
  absl::Duration took = absl::ZeroDuration();  // On this rank, since the end of the step before it.
  absl::Duration sync = absl::ZeroDuration();  // The time for which this rank waited for gradients
                                               // after its backward pass.
  double gradient_norm = kUnknown;             // Before clipping; unknown unless the options clip.
  StepClock clock = StepClock::kHost;  // Clock of the two times above: the device's on a device,
                                       // the host's on an exhausted rank.

  // The fields that are the same on all ranks.
  static void VisitFields(auto& self, auto& visit) {
    visit(self.epoch, self.step, self.active, self.samples, self.learning_rate, self.loss_scale);
  }
};

struct StepNumbers {
  double loss = kUnknown;  // For this rank's batch, as is `accuracy`.
  double accuracy = kUnknown;
  double exposed_ms = kUnknown;     // Communication that backward did not hide.
  double exposed_ratio = kUnknown;  // Fraction of the step.
  double step_ms = kUnknown;
  double predictions_per_second = kUnknown;  // Over all ranks.
};

inline StepNumbers NumbersOf(const StepFacts& facts, int64_t predictions_per_sample) {
  StepNumbers numbers;
  const bool has_time = facts.took > absl::ZeroDuration();
  if (has_time) {
    const double predictions =
        static_cast<double>(facts.samples) * static_cast<double>(predictions_per_sample);
    numbers.step_ms = absl::ToDoubleMilliseconds(facts.took);
    numbers.predictions_per_second = predictions / absl::ToDoubleSeconds(facts.took);
  }
  if (!facts.own.has_value() || facts.own->predictions == 0) return numbers;
  numbers.loss = facts.own->loss_mean;
  numbers.accuracy =
      static_cast<double>(facts.own->correct) / static_cast<double>(facts.own->predictions);
  numbers.exposed_ms = absl::ToDoubleMilliseconds(facts.sync);
  if (has_time) numbers.exposed_ratio = absl::FDivDuration(facts.sync, facts.took);
  return numbers;
}

// Converts a loss from nats, the unit of all losses, to bits.
inline double BitsOf(double loss) { return loss / std::numbers::ln2; }

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_STEP_FACTS_H_
