// The result of a forward pass: loss and hits, available at once or when the device has computed
// them.
//
//   EK_ASSIGN_OR_RETURN(PendingResult pending, model->StartForward(batch, Mode::kTraining));
//   ... Backward, the step's end, the next step ...
//   EK_ASSIGN_OR_RETURN(BatchResult result, pending.Wait(deadline));
//
// Models on the host have it at once; for a model on a device Wait() waits for the device.
//
// Ownership: a pending result may outlive the model.
// Threads:   values.
// Errors:    DeadlineExceeded, and the device's errors.

#ifndef EVENKEEL_TRAINER_MODELS_BATCH_RESULT_H_
#define EVENKEEL_TRAINER_MODELS_BATCH_RESULT_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

struct BatchResult {
  double loss_mean = 0;     // Mean cross-entropy over the predictions.
  int64_t predictions = 0;  // One per image, or per token.
  int64_t correct = 0;      // Predictions whose highest score is the target's.
};

class PendingResult {
 public:
  // Waits for the device and returns the mean loss and the number of correct predictions.
  using Ask = std::function<absl::StatusOr<BatchResult>(absl::Time deadline)>;

  PendingResult() = default;
  PendingResult(const BatchResult& result)
      : result_(result) {}  // NOLINT: a present result needs no wait
  explicit PendingResult(Ask ask) : ask_(std::move(ask)) {}

  // Returns without waiting.
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

#endif  // EVENKEEL_TRAINER_MODELS_BATCH_RESULT_H_
