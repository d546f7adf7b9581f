// Computes the exact loss and accuracy of a model over a part of a data set, per image or per
// token.
//
//   EK_ASSIGN_OR_RETURN(Evaluation mine, Evaluate(*model, data, begin, end));
//   // Ranks add up the three numbers of their parts, then:
//   sum.accuracy()
//
// Errors: those of Model::Forward; InvalidArgument unless 0 <= begin <= end <= data.size() and
//         batch_size > 0.

#ifndef EVENKEEL_TRAINER_MODELS_EVALUATE_H_
#define EVENKEEL_TRAINER_MODELS_EVALUATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

struct Evaluation {
  int64_t predictions = 0;
  int64_t correct = 0;
  double loss_sum = 0;

  double accuracy() const {
    return predictions > 0 ? static_cast<double>(correct) / predictions : 0;
  }
  double loss_mean() const { return predictions > 0 ? loss_sum / predictions : 0; }

  Evaluation& operator+=(const Evaluation& other) {
    predictions += other.predictions;
    correct += other.correct;
    loss_sum += other.loss_sum;
    return *this;
  }
  Evaluation& operator-=(const Evaluation& other) {
    return *this += {.predictions = -other.predictions,
                     .correct = -other.correct,
                     .loss_sum = -other.loss_sum};
  }

  static void VisitFields(auto& self, auto& visit) {
    visit(self.predictions, self.correct, self.loss_sum);
  }
};

// The evaluation with the lowest loss in a run.
struct BestTest {
  double loss = 0;
  int64_t step = 0;    // Steps of the group before it; 0: there is none.
  int64_t latest = 0;  // Steps before the latest evaluation.
  int64_t since = 0;   // Number of evaluations after the best.
  friend bool operator==(const BestTest&, const BestTest&) = default;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.loss, self.step, self.latest, self.since);
  }
};

// The batch size of evaluations by the trainer.
inline constexpr int64_t kLargestEvaluationBatch = 250;

// Evaluates samples [begin, end), in evaluation mode, in batches of at most `batch_size`.
absl::StatusOr<Evaluation> Evaluate(Model& model, const Dataset& data, int64_t begin, int64_t end,
                                    int64_t batch_size = kLargestEvaluationBatch);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_EVALUATE_H_
