// What a forward pass answers: loss and hits, now, or when the device that computes them has come to them.
//
//   EK_ASSIGN_OR_RETURN(PendingResult pending, model->StartForward(batch, Mode::kTraining));
//   ... Backward, the step's end, the next step ...
//   EK_ASSIGN_OR_RETURN(BatchResult result, pending.Wait(deadline));
//
// Models on the host have it at once; of a model on a device whoever asks early waits for the device.
//
// Ownership: a pending result may outlive the model.
// Threads:   values.
// Errors:    DeadlineExceeded, and what the device answers.

#ifndef EVENKEEL_TRAINER_BATCH_RESULT_H_
#define EVENKEEL_TRAINER_BATCH_RESULT_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

struct BatchResult {
  double loss_mean = 0;     // Mean cross-entropy over the predictions.
  int64_t predictions = 0;  // One per image, or per token.
  int64_t correct = 0;      // How many of them have their highest score where they should.
};

class PendingResult {
 public:
  // Answers the mean loss and what is correct.
  using Ask = std::function<absl::StatusOr<BatchResult>(absl::Time deadline)>;

  PendingResult() = default;
  PendingResult(const BatchResult& result) : result_(result) {}  // NOLINT: what is there has been waited for
  explicit PendingResult(Ask ask) : ask_(std::move(ask)) {}

  // Without a wait.
  bool is_there() const { return ask_ == nullptr; }
  absl::StatusOr<BatchResult> Wait(absl::Time deadline) const {
    if (is_there()) return result_;
    absl::StatusOr<BatchResult> result = ask_(deadline);
    if (result.ok()) result->predictions = result_.predictions;
    return result;
  }
  void SetPredictions(int64_t predictions) { result_.predictions = predictions; }

 private:
  BatchResult result_;
  Ask ask_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_BATCH_RESULT_H_
