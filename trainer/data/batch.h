// The input of one pass of a model: images with their classes, or token sequences with the tokens
// that follow.
//
//   const Batch batch = ImageBatch{.images = images, .labels = labels};
//   SamplesOf(batch);                                       // 64: the unit of a sampler
//   PredictionsOf(batch);  // 64, or 64 * context: the mean loss is a mean over these
//
// Threads:   values.
// Ownership: views; their memory must not change until the end of the pass, backward included.
// Errors:    InvalidArgument with the numbers, for a batch that does not fit the model.

#ifndef EVENKEEL_TRAINER_DATA_BATCH_H_
#define EVENKEEL_TRAINER_DATA_BATCH_H_

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

struct ImageBatch {
  std::span<const float> images;    // [n, channels, side, side], values in [0, 1]
  std::span<const uint8_t> labels;  // [n]
};

struct TokenBatch {
  std::span<const int32_t> inputs;   // [n, context]
  std::span<const int32_t> targets;  // [n, context]: the token that follows each of the inputs
  int64_t context = 0;
};

using Batch = std::variant<ImageBatch, TokenBatch>;

// Memory for a batch of a data set, reused for the next one.
struct BatchMemory {
  std::vector<float> images;
  std::vector<uint8_t> labels;
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
};

int64_t SamplesOf(const Batch& batch);
int64_t PredictionsOf(const Batch& batch);

// Returns the batch if it is a nonempty one of images of `pixels` pixels, all channels together,
// with labels below `classes`.
absl::StatusOr<ImageBatch> CheckImages(const Batch& batch, int64_t pixels, int classes);
// Returns the batch if it is a nonempty one of sequences of at most `max_context` tokens, with
// inputs and targets from 0 to `vocabulary` - 1.
absl::StatusOr<TokenBatch> CheckTokens(const Batch& batch, int64_t max_context, int64_t vocabulary);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_BATCH_H_
