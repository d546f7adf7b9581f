// What a model is given in one pass: images with their classes, or token sequences with those that follow.
//
//   const Batch batch = ImageBatch{.images = images, .labels = labels};
//   SamplesOf(batch);                                       // 64: what a sampler deals out
//   PredictionsOf(batch);                                   // 64, or 64 * context: what the mean loss is a mean over
//
// Threads:   values.
// Ownership: views; what they show must stay as it is until the pass is over, backward included.
// Errors:    InvalidArgument with the numbers, for a batch that a model of this kind can't take.

#ifndef EVENKEEL_TRAINER_BATCH_H_
#define EVENKEEL_TRAINER_BATCH_H_

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

// Memory that a data set puts a batch into; used again for the next one.
struct BatchMemory {
  std::vector<float> images;
  std::vector<uint8_t> labels;
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
};

int64_t SamplesOf(const Batch& batch);
int64_t PredictionsOf(const Batch& batch);

// The batch as images of so many pixels, channels included, with labels below `classes`; not empty.
absl::StatusOr<ImageBatch> CheckImages(const Batch& batch, int64_t pixels, int classes);
// The batch as sequences of up to `max_context` tokens, inputs and targets from 0 to below `vocabulary`; not empty.
absl::StatusOr<TokenBatch> CheckTokens(const Batch& batch, int64_t max_context, int64_t vocabulary);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_BATCH_H_
