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
//   data->tokenizer;       // Learned from the text's training part.
//
// Threads: immutable.
// Errors:  NotFound, which lists the kinds of data, for a path that does not exist; InvalidArgument
//          with the path for other files of llm.c than token shards, for a data set without
//          samples, and for token shards without recognizable test shards; else those of the data
//          set's kind, of the tokenizer and of the system, with the path.

#ifndef EVENKEEL_TRAINER_DATA_TRAINING_DATA_H_
#define EVENKEEL_TRAINER_DATA_TRAINING_DATA_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/token_shards.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

enum class DataKind { kIdx, kCifar, kText, kTokens };

// Returns the kind of the data at a path. A folder with one of MNIST's four files is kIdx; one with
// data_batch_1.bin is kCifar; a file, a folder or a pattern with a file that begins as a token
// shard is kTokens; any other file, folder with files, or pattern that files match is kText.
absl::StatusOr<DataKind> GuessDataKind(const std::string& path);

struct TrainingData {
  std::unique_ptr<const Dataset> train;
  std::unique_ptr<const Dataset> test;
  std::optional<ImageShape> image;  // For images.
  int64_t vocabulary = 0;           // Tokens are below it; 0 for images.
  // Always set for text; for shards only if one is given.
  std::shared_ptr<const Tokenizer> tokenizer;
};

struct DataOptions {
  std::string path = kFashionMnistFolder;
  std::optional<DataKind> kind;  // None: the one that GuessDataKind returns.

  // For text and token shards.
  int64_t context = 128;
  std::string tokenizer;  // Path (tokenizer_file.h); empty: none.
  // Must not be below the tokenizer's size, which is the default. Without a tokenizer: for shards
  // kGpt2Vocabulary; for text 256 (bytes), or a tokenizer of this size is learned from the training
  // part.
  std::optional<int64_t> vocabulary;
  bool may_make_tokenizer = true;  // False: an error instead of learning one (--init).
  // The shards to test with. Empty: like `path`, with "val" for the last "train" in it; of a
  // folder, *train*.bin is to train on and *val*.bin to test with.
  std::string test_path;
};

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(
    const DataOptions& options, Contents contents = Contents::kAll);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TRAINING_DATA_H_
