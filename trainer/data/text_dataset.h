// Any text as sequences of bytes, a part of it held out for testing.
//
//   EK_ASSIGN_OR_RETURN(const std::shared_ptr<const std::string> text, LoadText(kJargonFile));
//   EK_ASSIGN_OR_RETURN(const TextDataset train, TextDataset::Make(text, {.context = 256, .split = Split::kTrain}));
//   EK_ASSIGN_OR_RETURN(const TextDataset test, TextDataset::Make(text, {.context = 256, .split = Split::kTest}));
//
// A token is a byte, so that every text in every encoding has a vocabulary of 256. Several files are one text, as
// `cat` would print them in the order of their names.
//
// Held out is every twentieth block of 4096 bytes: [19 * 4096, 20 * 4096), [39 * 4096, 40 * 4096), ... What is left
// after the last whole block belongs to that block. Training sees nothing of the held-out bytes, not even as a target:
// the runs of bytes between are cut into sequences one by one, as sequences.h says: of a run no prediction is missing
// but that of its first byte, and a context that is a power of two makes one of a run's predictions twice (of the text's
// last run more, where its length doesn't come out even).
//
// Threads:   immutable.
// Ownership: both splits share the text.
// Errors:    InvalidArgument with the numbers for less than 20 blocks and for a context that no held-out block has room
//            for; LoadText: NotFound, or what ReadFile says, with the path.

#ifndef EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_
#define EVENKEEL_TRAINER_DATA_TEXT_DATASET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/data/sequences.h"
#include "evenkeel/trainer/dataset.h"

namespace evenkeel {

// The Jargon File, where Debian's package jargon-text installs it (as .gz): 1.7 MB of prose.
inline constexpr char kJargonFile[] = "/usr/share/doc/jargon-text/jargon.txt";

// The text of a file, of a folder's files or of those that match a pattern (file_list.h), each plain or as .gz. A
// path of a file may leave out the .gz.
absl::StatusOr<std::shared_ptr<const std::string>> LoadText(const std::string& path);
// Those files.
absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& path);

struct TextOptions {
  int64_t context = 0;  // From 1 to 4095.
  Split split = Split::kTrain;
};

class TextDataset : public Dataset {
 public:
  static constexpr int64_t kVocabulary = 256;
  static constexpr int64_t kBlock = 4096;    // Bytes.
  static constexpr int64_t kHoldOutOf = 20;  // Of so many blocks, the last one.

  static absl::StatusOr<TextDataset> Make(std::shared_ptr<const std::string> text, const TextOptions& options);

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
