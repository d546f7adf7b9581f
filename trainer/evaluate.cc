#include "evenkeel/trainer/evaluate.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/batch.h"

namespace evenkeel {
namespace {
constexpr int64_t kMaxBatchSize = 250;
constexpr int64_t kPredictions = 2048;  // Of a batch: activations for as many are in memory.
}  // namespace

absl::StatusOr<Evaluation> Evaluate(Model& model, const Dataset& data, int64_t begin, int64_t end) {
  if (begin < 0 || begin > end || end > data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("evaluate: samples ", begin, " to ", end, " are not within ", data.size()));
  }
  const int64_t batch_size = std::clamp<int64_t>(kPredictions / data.predictions_per_sample(), 1, kMaxBatchSize);
  Evaluation evaluation;
  std::vector<int32_t> samples;
  BatchMemory memory;
  for (int64_t first = begin; first < end; first += batch_size) {
    samples.resize(std::min(batch_size, end - first));
    std::iota(samples.begin(), samples.end(), static_cast<int32_t>(first));
    EK_ASSIGN_OR_RETURN(const BatchResult result, model.Forward(data.Gather(samples, memory), Mode::kEvaluation));
    evaluation.predictions += result.predictions;
    evaluation.correct += result.correct;
    evaluation.loss_sum += result.loss_mean * static_cast<double>(result.predictions);
  }
  return evaluation;
}

}  // namespace evenkeel
