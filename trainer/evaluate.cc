#include "evenkeel/trainer/evaluate.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/image_shape.h"

namespace evenkeel {
namespace {
constexpr int64_t kBatchSize = 250;
}  // namespace

absl::StatusOr<Evaluation> Evaluate(Model& model, const IdxDataset& data, int64_t begin, int64_t end) {
  if (begin < 0 || begin > end || end > data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("evaluate: samples ", begin, " to ", end, " are not within ", data.size()));
  }
  Evaluation evaluation;
  std::vector<int32_t> samples;
  std::vector<float> images;
  std::vector<uint8_t> labels;
  for (int64_t first = begin; first < end; first += kBatchSize) {
    samples.resize(std::min(kBatchSize, end - first));
    std::iota(samples.begin(), samples.end(), static_cast<int32_t>(first));
    images.resize(samples.size() * kImagePixels);
    labels.resize(samples.size());
    data.Gather(samples, images, labels);
    EK_ASSIGN_OR_RETURN(const BatchResult result, model.Forward(images, labels, Mode::kEvaluation));
    evaluation.samples += static_cast<int64_t>(samples.size());
    evaluation.correct += result.correct;
    evaluation.loss_sum += result.loss_mean * static_cast<double>(samples.size());
  }
  return evaluation;
}

}  // namespace evenkeel
