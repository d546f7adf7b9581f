// A text as sequences of bytes, a part of it held out for testing.
//
//   EK_ASSIGN_OR_RETURN(const std::shared_ptr<const std::string> text, LoadText(kJargonFile));
//   EK_ASSIGN_OR_RETURN(const TextDataset train,
//                       TextDataset::Make(text, {.context = 256, .split = Split::kTrain}));
//   EK_ASSIGN_OR_RETURN(const TextDataset test,
//                       TextDataset::Make(text, {.context = 256, .split = Split::kTest}));
//
// A token is a byte, so that every text in every encoding has a vocabulary of 256. Several files
// are one text, concatenated in the order of their names.
//
// Every twentieth block of 4096 bytes is held out: [19 * 4096, 20 * 4096), [39 * 4096, 40 * 4096),
// ... The rest after the last whole block belongs to that block. Training uses no held-out bytes,
// not even as targets: each run of bytes between them is cut into sequences by itself
// (sequences.h). In a run only its first byte is not predicted, and with a context that is a power
// of two one byte is predicted twice (in the text's last run more, unless its length is a
// multiple).
//
// Threads:   immutable.
// Ownership: both splits share the text.
// Errors:    InvalidArgument with the numbers for less than 20 blocks and for a context that does
//            not fit a held-out block; LoadText: NotFound, or the errors of ReadFile, with the
//            path.

#ifndef EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_
#define EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/sequences.h"

namespace evenkeel {

// The path of the Jargon File of Debian's package jargon-text (as .gz): 1.7 MB of prose.
inline constexpr char kJargonFile[] = "/usr/share/doc/jargon-text/jargon.txt";

// Returns the text of the files of `path` (file_list.h), each plain or as .gz. The path of a file
// may omit the .gz.
absl::StatusOr<std::shared_ptr<const std::string>> LoadText(const std::string& path);
// Returns these files.
absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& path);

struct TextOptions {
  int64_t context = 0;  // From 1 to 4095.
  Split split = Split::kTrain;
};

class TextDataset : public Dataset {
 public:
  static constexpr int64_t kVocabulary = 256;
  static constexpr int64_t kBlock = 4096;    // Bytes.
  static constexpr int64_t kHoldOutOf = 20;  // The last one of so many blocks is held out.

  static absl::StatusOr<TextDataset> Make(std::shared_ptr<const std::string> text,
                                          const TextOptions& options);

  int64_t size() const override { return plan_.size(); }
  int64_t predictions_per_sample() const override { return plan_.context(); }
  int64_t vocabulary() const { return kVocabulary; }
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  TextDataset(std::shared_ptr<const std::string> text, SequencePlan plan)
      : text_(std::move(text)), plan_(std::move(plan)) {}

  std::shared_ptr<const std::string> text_;
  SequencePlan plan_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_
