// Samples that models are trained on and judged by.
//
//   std::unique_ptr<const Dataset> data = ...;              // idx_dataset.h, cifar_dataset.h, text_dataset.h, ...
//   BatchMemory memory;
//   const Batch batch = data->Gather(samples, memory);      // samples: what the sampler deals out (sampler.h)
//
// Threads:   immutable.
// Ownership: a batch shows `memory`, until that is used again.

#ifndef EVENKEEL_TRAINER_DATASET_H_
#define EVENKEEL_TRAINER_DATASET_H_

#include <cstdint>
#include <span>

#include "evenkeel/trainer/batch.h"

namespace evenkeel {

// Which samples: those to train on, or those held out to judge by.
enum class Split { kTrain, kTest };

class Dataset {
 public:
  virtual ~Dataset() = default;

  // How many samples there are; below 2^31.
  virtual int64_t size() const = 0;
  // How many labels or tokens are predicted for each: 1, or the context.
  virtual int64_t predictions_per_sample() const { return 1; }
  // The given samples, each below size(), one after the other.
  virtual Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const = 0;

 protected:
  Dataset() = default;
  Dataset(const Dataset&) = default;
  Dataset& operator=(const Dataset&) = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATASET_H_
