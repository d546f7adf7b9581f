#include "evenkeel/trainer/models/evaluate.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/models/batch_result.h"

namespace evenkeel {

absl::StatusOr<Evaluation> Evaluate(Model& model, const Dataset& data, int64_t begin, int64_t end,
                                    int64_t batch_size) {
  if (batch_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("evaluate: batch size must be at least 1, got ", batch_size));
  }
  if (begin < 0 || begin > end || end > data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("evaluate: samples ", begin, " to ", end, " are not within ", data.size()));
  }
  Evaluation evaluation;
  std::vector<int32_t> samples;
  BatchMemory memory;
  // One batch behind, so that a device has the next one when it is done with it.
  PendingResult before;
  const auto add = [&](const PendingResult& pending) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const BatchResult result,
                        pending.Wait(SteadyNow() + model.place().timeout));
    evaluation.predictions += result.predictions;
    evaluation.correct += result.correct;
    evaluation.loss_sum += result.loss_mean * static_cast<double>(result.predictions);
    return absl::OkStatus();
  };
  for (int64_t first = begin; first < end; first += batch_size) {
    samples.resize(std::min(batch_size, end - first));
    std::iota(samples.begin(), samples.end(), static_cast<int32_t>(first));
    absl::StatusOr<PendingResult> pending =
        model.StartForward(data.Gather(samples, memory), Mode::kEvaluation);
    if (absl::IsInvalidArgument(pending.status())) return data.Explain(pending.status(), samples);
    EK_RETURN_IF_ERROR(pending.status());
    EK_RETURN_IF_ERROR(add(std::exchange(before, *std::move(pending))));
  }
  EK_RETURN_IF_ERROR(add(before));
  return evaluation;
}

}  // namespace evenkeel
