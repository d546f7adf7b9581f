// Samples for training and testing models.
//
//   // image_dataset.h, text_dataset.h, ...
//   std::unique_ptr<const Dataset> data = ...;
//   BatchMemory memory;
//   // samples: from the sampler (sampler.h)
//   const Batch batch = data->Gather(samples, memory);
//
// Threads:   immutable.
// Ownership: a batch refers to `memory`, until `memory` is used again.

#ifndef EVENKEEL_TRAINER_DATA_DATASET_H_
#define EVENKEEL_TRAINER_DATA_DATASET_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "evenkeel/trainer/data/batch.h"

namespace evenkeel {

// The samples for training, or those held out for testing.
enum class Split { kTrain, kTest };
// All of a data set, or only what checks of a run need: its images are not unpacked, and Gather()
// may not be called.
enum class Contents { kAll, kSizes };

class Dataset {
 public:
  virtual ~Dataset() = default;

  // Returns the number of samples, which is below 2^31.
  virtual int64_t size() const = 0;
  // Returns the number of labels or tokens to predict for each: 1, or the context.
  virtual int64_t predictions_per_sample() const { return 1; }
  // Returns the mean number of bytes of a text that one of them predicts; 0 if unknown, or no text.
  virtual double bytes_per_prediction() const { return 0; }
  // Returns the bytes of the process's memory that it holds, without mapped files.
  virtual int64_t held_bytes() const { return 0; }
  // Returns the given samples, each below size(), in this order.
  virtual Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const = 0;
  // Returns the error of a model that refused the samples, with the files that have them, where the
  // data set did not check all of its files.
  virtual absl::Status Explain(const absl::Status& error, std::span<const int32_t>) const {
    return error;
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_DATASET_H_
