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
// ... The rest after the last whole block belongs to that block. With a tokenizer a block has at
// least 16 bytes for each token of the context. Training uses no held-out bytes, not even as
// targets: each run of bytes between held-out blocks is tokenized and cut into sequences
// separately. Every token of a run except the first is predicted, fewer than `context` of them
// twice (sequences.h).
//
// Threads:   immutable.
// Memory:    without a tokenizer both splits share the text; with one, 4 bytes for each token.
// Errors:    InvalidArgument with the numbers for less than 20 blocks, and for a context that does
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
// may omit the .gz. kRefuse: a file with a zero byte is no text.
enum class Zeros { kTake, kRefuse };
absl::StatusOr<std::shared_ptr<const std::string>> LoadText(const std::string& path,
                                                            Zeros zeros = Zeros::kTake);
// Returns these files.
absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& path);

struct TextOptions {
  int64_t context = 0;  // 1 to 4095 without a tokenizer.
  Split split = Split::kTrain;
  const Tokenizer* tokenizer = nullptr;  // Null: tokens are bytes. Used by Make() only.
};

class TextDataset : public Dataset {
 public:
  static constexpr int64_t kBlock = 4096;    // Bytes.
  static constexpr int64_t kHoldOutOf = 20;  // The last of every 20 blocks is held out.

  static absl::StatusOr<TextDataset> Make(std::shared_ptr<const std::string> text,
                                          const TextOptions& options);
  // Returns the runs of the split, each of which Make() tokenizes by itself. Only whether
  // options.tokenizer is null matters.
  static absl::StatusOr<std::vector<absl::string_view>> RunsOf(absl::string_view text,
                                                               const TextOptions& options);

  int64_t size() const override { return plan_.size(); }
  int64_t predictions_per_sample() const override { return plan_.context(); }
  double bytes_per_prediction() const override { return bytes_per_prediction_; }
  int64_t held_bytes() const override;
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  explicit TextDataset(int64_t context) : plan_(context) {}

  std::shared_ptr<const std::string> text_;  // Null with a tokenizer.
  std::vector<int32_t> tokens_;              // Empty without one.
  SequencePlan plan_;
  double bytes_per_prediction_ = 1;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_
