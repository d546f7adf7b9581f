// Moves and mirrors training images at random, so that they differ in every epoch.
//
//   const Batch batch = data.Gather(samples, memory);
//   // The batch shows the changed images.
//   Augment({.seed = 7}, shape, epoch, samples, memory.images);
//
// An image is mirrored left to right in half of the epochs, then moved by up to `max_shift` pixels
// in each direction; new pixels at the border are 0, MNIST's black. All channels of an image
// change together.
//
// The change depends on seed, epoch and sample alone: it is the same on any rank, in
// any batch, and after an interruption of the run.
//
// Threads: pure functions, apart from the images changed in place.

#ifndef EVENKEEL_TRAINER_DATA_AUGMENT_H_
#define EVENKEEL_TRAINER_DATA_AUGMENT_H_

#include <cstdint>
#include <span>

#include "evenkeel/trainer/data/image_shape.h"

namespace evenkeel {

struct AugmentOptions {
  int max_shift = 2;  // Pixels; 0 or more.
  bool mirrors = true;
  uint64_t seed = 0;
};

struct ImageChange {
  int right = 0;  // Pixels; negative: to the left.
  int down = 0;
  bool is_mirrored = false;
  friend bool operator==(const ImageChange&, const ImageChange&) = default;
};

ImageChange ChangeOf(const AugmentOptions& options, int epoch, int32_t sample);

// `image` and `changed` are [channels, side, side] and must not overlap.
void ApplyChange(const ImageChange& change, const ImageShape& shape, std::span<const float> image,
                 std::span<float> changed);

// Changes the images of `samples`, [samples, channels, side, side], in place.
void Augment(const AugmentOptions& options, const ImageShape& shape, int epoch,
             std::span<const int32_t> samples, std::span<float> images);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_AUGMENT_H_
