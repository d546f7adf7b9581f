// Batches for tests of models, and the labels of images that a model can learn.

#ifndef EVENKEEL_TRAINER_MODELS_TESTING_MODEL_TEST_DATA_H_
#define EVENKEEL_TRAINER_MODELS_TESTING_MODEL_TEST_DATA_H_

#include <cstdint>
#include <vector>

#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

struct TestBatch {
  std::vector<float> images;
  std::vector<uint8_t> labels;
};

// Noise with a bright stripe whose row tells the label.
inline TestBatch StripedImages(int count, uint64_t seed, const ImageShape& shape = {}) {
  StableRandom random(seed);
  TestBatch batch;
  for (int i = 0; i < count; ++i) {
    const auto label = static_cast<uint8_t>(random.Below(kClasses));
    batch.labels.push_back(label);
    for (int pixel = 0; pixel < shape.pixels(); ++pixel) {
      const bool is_in_stripe = pixel / shape.side % shape.side / 2 == label + 2;
      batch.images.push_back(static_cast<float>(0.5 * random.Uniform() + (is_in_stripe ? 0.5 : 0)));
    }
  }
  return batch;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_TESTING_MODEL_TEST_DATA_H_
