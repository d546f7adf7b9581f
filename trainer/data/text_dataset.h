// A text as sequences of tokens, a part of it held out for testing.
//
//   EK_ASSIGN_OR_RETURN(const std::shared_ptr<const std::string> text, LoadText(kJargonFile));
//   EK_ASSIGN_OR_RETURN(const TextDataset train,
//                       TextDataset::Make(text, {.context = 256, .split = Split::kTrain}));
//   EK_ASSIGN_OR_RETURN(const TextDataset test,
//                       TextDataset::Make(text, {.context = 256, .split = Split::kTest}));
//
// Without a tokenizer a token is a byte, so that every text in every encoding has a vocabulary of
// 256. Several files are one text, concatenated in the order of their names.
//
// Every twentieth block of 4096 bytes is held out: [19 * 4096, 20 * 4096), [39 * 4096, 40 * 4096),
// ... The rest after the last whole block belongs to that block. With a tokenizer blocks have 16
// bytes for each token of the context, if that is more. Training uses no held-out bytes, not even
// as targets: each run of bytes between them is tokenized and cut into sequences by itself
// (sequences.h). In a run only its first token is not predicted, and fewer than the context are
// predicted twice; of bytes, if the context is a power of two, one (in the text's last run more,
// unless its length is a multiple).
//
// Threads:   immutable.
// Memory:    of bytes, both splits share the text; else 4 bytes for each token.
// Errors:    InvalidArgument with the numbers for less than 20 blocks and for a context that does
//            not fit a held-out block; LoadText: NotFound, or the errors of ReadFile, with the
//            path.

#ifndef EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_
#define EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/sequences.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

// The path of the Jargon File of Debian's package jargon-text (as .gz): 1.7 MB of prose.
inline constexpr char kJargonFile[] = "/usr/share/doc/jargon-text/jargon.txt";

// Returns the text of the files of `path` (file_list.h), each plain or as .gz. The path of a file
// may omit the .gz.
absl::StatusOr<std::shared_ptr<const std::string>> LoadText(const std::string& path);
// Returns these files.
absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& path);

struct TextOptions {
  int64_t context = 0;  // Of bytes from 1 to 4095.
  Split split = Split::kTrain;
  const Tokenizer* tokenizer = nullptr;  // Null: of bytes. Used during Make() only.
};

class TextDataset : public Dataset {
 public:
  static constexpr int64_t kBlock = 4096;    // Bytes.
  static constexpr int64_t kHoldOutOf = 20;  // The last one of so many blocks is held out.

  static absl::StatusOr<TextDataset> Make(std::shared_ptr<const std::string> text,
                                          const TextOptions& options);
  // Returns the texts that Make() would tokenize, with any tokenizer.
  static absl::StatusOr<std::vector<absl::string_view>> RunsOf(absl::string_view text,
                                                               const TextOptions& options);

  int64_t size() const override { return plan_.size(); }
  int64_t predictions_per_sample() const override { return plan_.context(); }
  double bytes_per_prediction() const override { return bytes_per_prediction_; }
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  explicit TextDataset(int64_t context) : plan_(context) {}

  std::shared_ptr<const std::string> text_;  // Of bytes; else
  std::vector<int32_t> tokens_;              // these.
  SequencePlan plan_;
  double bytes_per_prediction_ = 1;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_
