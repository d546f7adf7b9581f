// The two data sets of a run, loaded once and shared by all ranks of a process.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<const TrainingData> data,
//                       LoadTrainingData({.path = kFashionMnistFolder}));
//   data->train->size();   // 60000
//   data->image;           // The input of the model: {.channels = 1, .side = 28}.
//
//   EK_ASSIGN_OR_RETURN(data, LoadTrainingData({.path = kJargonFile, .context = 128}));
//   data->vocabulary;      // The vocabulary of the model: 256.
//   EK_ASSIGN_OR_RETURN(data, LoadTrainingData({.path = kJargonFile, .vocabulary = 4096}));
//   data->tokenizer;       // Made of the text's training part.
//
// Threads: immutable.
// Errors:  those of GuessDataKind, of the data set's kind and of the tokenizer, with the path;
// InvalidArgument for a
//          data set without samples, and for token shards without recognizable test shards.

#ifndef EVENKEEL_TRAINER_DATA_TRAINING_DATA_H_
#define EVENKEEL_TRAINER_DATA_TRAINING_DATA_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/data_kind.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/idx_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/token_shards.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

struct TrainingData {
  std::unique_ptr<const Dataset> train;
  std::unique_ptr<const Dataset> test;
  std::optional<ImageShape> image;             // For images.
  int64_t vocabulary = 0;                      // Tokens are below it; 0 for images.
  std::shared_ptr<const Tokenizer> tokenizer;  // Of a text always, of shards if it is given.
};

struct DataOptions {
  std::string path = kFashionMnistFolder;
  std::optional<DataKind> kind;  // None: what GuessDataKind says.

  // For text and token shards.
  int64_t context = 128;
  std::string tokenizer;  // Path (tokenizer_file.h); empty: none.
  // At least the tokenizer's. None: as many as it has; without one kGpt2Vocabulary for shards, and
  // for a text 256, each token a byte. A text without a tokenizer gets one with as many tokens,
  // made of its training part.
  std::optional<int64_t> vocabulary;
  bool may_make_tokenizer = true;
  // The shards to test with. Empty: like `path`, with "val" for the last "train" in it; of a
  // folder, *train*.bin is to train on and *val*.bin to test with.
  std::string test_path;
};

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const DataOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TRAINING_DATA_H_
