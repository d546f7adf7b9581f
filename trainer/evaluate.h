// Loss and accuracy of a model over a part of a data set, exactly.
//
//   EK_ASSIGN_OR_RETURN(Evaluation mine, Evaluate(*model, data, begin, end));
//   // Ranks add up the three numbers of their parts, then:
//   sum.accuracy()
//
// Errors: those of Model::Forward; InvalidArgument unless 0 <= begin <= end <= data.size().

#ifndef EVENKEEL_TRAINER_EVALUATE_H_
#define EVENKEEL_TRAINER_EVALUATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/idx_dataset.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

struct Evaluation {
  int64_t samples = 0;
  int64_t correct = 0;
  double loss_sum = 0;

  double accuracy() const { return samples > 0 ? static_cast<double>(correct) / samples : 0; }
  double loss_mean() const { return samples > 0 ? loss_sum / samples : 0; }

  Evaluation& operator+=(const Evaluation& other) {
    samples += other.samples;
    correct += other.correct;
    loss_sum += other.loss_sum;
    return *this;
  }
  Evaluation& operator-=(const Evaluation& other) {
    return *this += {.samples = -other.samples, .correct = -other.correct, .loss_sum = -other.loss_sum};
  }
};

// Samples [begin, end), in evaluation mode, in batches of 250.
absl::StatusOr<Evaluation> Evaluate(Model& model, const IdxDataset& data, int64_t begin, int64_t end);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_EVALUATE_H_
