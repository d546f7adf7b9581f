#include "evenkeel/trainer/data/batch.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

absl::Status CheckRange(std::span<const int32_t> tokens, int64_t vocabulary) {
  const auto [lowest, highest] = std::ranges::minmax(tokens);
  if (lowest >= 0 && highest < vocabulary) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("forward: token ", lowest < 0 ? lowest : highest,
                                                 " is not within 0 to ", vocabulary - 1));
}

}  // namespace

int64_t SamplesOf(const Batch& batch) {
  if (const auto* images = std::get_if<ImageBatch>(&batch))
    return static_cast<int64_t>(images->labels.size());
  const auto& tokens = std::get<TokenBatch>(batch);
  return tokens.context > 0 ? static_cast<int64_t>(tokens.inputs.size()) / tokens.context : 0;
}

int64_t PredictionsOf(const Batch& batch) {
  const auto* tokens = std::get_if<TokenBatch>(&batch);
  return tokens == nullptr ? SamplesOf(batch) : static_cast<int64_t>(tokens->targets.size());
}

absl::StatusOr<ImageBatch> CheckImages(const Batch& batch, int64_t pixels, int classes) {
  const auto* images = std::get_if<ImageBatch>(&batch);
  if (images == nullptr)
    return absl::InvalidArgumentError("forward: this model is for images, the batch is of tokens");
  const size_t samples = images->labels.size();
  if (samples == 0) return absl::InvalidArgumentError("forward: the batch is empty");
  if (images->images.size() != samples * pixels) {
    return absl::InvalidArgumentError(absl::StrCat("forward: ", samples, " labels need ",
                                                   samples * pixels, " pixels, got ",
                                                   images->images.size()));
  }
  const uint8_t highest = *std::ranges::max_element(images->labels);
  if (highest < classes) return *images;
  return absl::InvalidArgumentError(
      absl::StrCat("forward: label ", highest, " is not below ", classes));
}

absl::StatusOr<TokenBatch> CheckTokens(const Batch& batch, int64_t max_context,
                                       int64_t vocabulary) {
  const auto* tokens = std::get_if<TokenBatch>(&batch);
  if (tokens == nullptr)
    return absl::InvalidArgumentError("forward: this model is for tokens, the batch is of images");
  if (tokens->inputs.empty()) return absl::InvalidArgumentError("forward: the batch is empty");
  if (tokens->context < 1 || tokens->context > max_context) {
    return absl::InvalidArgumentError(absl::StrCat("forward: sequences of ", tokens->context,
                                                   " tokens do not fit a context of ",
                                                   max_context));
  }
  if (tokens->inputs.size() != tokens->targets.size() ||
      tokens->inputs.size() % tokens->context != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("forward: ", tokens->inputs.size(), " inputs and ", tokens->targets.size(),
                     " targets do not form the same number of sequences of ", tokens->context));
  }
  if (absl::Status status = CheckRange(tokens->inputs, vocabulary); !status.ok()) return status;
  if (absl::Status status = CheckRange(tokens->targets, vocabulary); !status.ok()) return status;
  return *tokens;
}

}  // namespace evenkeel
