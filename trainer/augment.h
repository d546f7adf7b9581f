// Training images, moved and mirrored at random, so that a model sees a new picture of each in every epoch.
//
//   const Batch batch = data.Gather(samples, memory);
//   Augment({.seed = 7}, shape, epoch, samples, memory.images);   // The batch shows the changed images.
//
// An image is mirrored left to right in half of the epochs, then moved by up to `max_shift` pixels in each direction;
// what comes in at the border is 0, MNIST's black. All channels of an image go together.
//
// The change depends on seed, epoch and sample alone: it is the same on whichever rank, in whichever batch, and after a
// run has been interrupted.
//
// Threads: pure functions, but for the images that are changed in place.

#ifndef EVENKEEL_TRAINER_AUGMENT_H_
#define EVENKEEL_TRAINER_AUGMENT_H_

#include <cstdint>
#include <span>

#include "evenkeel/trainer/image_shape.h"

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
void Augment(const AugmentOptions& options, const ImageShape& shape, int epoch, std::span<const int32_t> samples,
             std::span<float> images);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_AUGMENT_H_
