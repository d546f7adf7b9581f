// The two data sets of a run, loaded once and shared by all ranks of a process.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<const TrainingData> data, LoadTrainingData(kFashionMnistFolder));
//   data->train->size();   // 60000
//   data->image;           // What the model must take: {.channels = 1, .side = 28}.
//
//   EK_ASSIGN_OR_RETURN(data, LoadTrainingData(DataOptions{.path = kJargonFile, .context = 128}));
//   data->vocabulary;      // What the model must take: 256.
//
// Threads: immutable.
// Errors:  those of GuessDataKind and of the data set's kind, with the path; InvalidArgument for a data set without
//          samples, and for token shards where it is not clear which ones to test with.

#ifndef EVENKEEL_TRAINER_TRAINING_DATA_H_
#define EVENKEEL_TRAINER_TRAINING_DATA_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/data_kind.h"
#include "evenkeel/trainer/data/token_shards.h"
#include "evenkeel/trainer/dataset.h"
#include "evenkeel/trainer/idx_dataset.h"
#include "evenkeel/trainer/image_shape.h"

namespace evenkeel {

struct TrainingData {
  std::unique_ptr<const Dataset> train;
  std::unique_ptr<const Dataset> test;
  std::optional<ImageShape> image;  // Of images.
  int64_t vocabulary = 0;           // Of text and tokens: each is below it; 0 for images.
};

struct DataOptions {
  std::string path = kFashionMnistFolder;
  std::optional<DataKind> kind;  // None: what GuessDataKind says.
  int64_t context = 128;         // Of text and tokens.

  // Of token shards.
  int64_t vocabulary = kGpt2Vocabulary;
  // Those to test with. Empty: like `path`, with "val" for the last "train" in it; of a folder, *train*.bin is to train
  // on and *val*.bin to test with.
  std::string test_path;
};

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const DataOptions& options);
// What lies there, with the other options as they are.
absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAINING_DATA_H_
