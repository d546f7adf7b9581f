#include "evenkeel/trainer/data/text_dataset.h"

#include <unistd.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/file_list.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

namespace evenkeel {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{16} << 30;

bool IsThere(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// Returns the blocks of a split, adjacent ones as one run.
SequencePlan PlanRuns(int64_t bytes, const TextOptions& options) {
  const int64_t blocks = bytes / TextDataset::kBlock;
  const auto end_of = [&](int64_t block) {
    return block + 1 == blocks ? bytes : (block + 1) * TextDataset::kBlock;
  };
  SequencePlan plan(options.context);
  for (int64_t block = 0; block < blocks; block += TextDataset::kHoldOutOf) {
    const int64_t held_out = block + TextDataset::kHoldOutOf - 1;
    if (options.split == Split::kTrain) {
      const int64_t begin = block * TextDataset::kBlock;
      plan.AddRun({.begin = begin, .tokens = end_of(std::min(held_out, blocks) - 1) - begin});
    } else if (held_out < blocks) {
      const int64_t begin = held_out * TextDataset::kBlock;
      plan.AddRun({.begin = begin, .tokens = end_of(held_out) - begin});
    }
  }
  return plan;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& path) {
  if (!IsThere(path) && IsThere(path + ".gz")) return std::vector<std::string>{path + ".gz"};
  if (path != kJargonFile || IsThere(path)) return FilesAt(path);
  return absl::NotFoundError(
      absl::StrCat("no file ", path, ", plain or .gz;  Debian's package jargon-text ",
                   "installs it, unless dpkg is configured to exclude /usr/share/doc"));
}

absl::StatusOr<std::shared_ptr<const std::string>> LoadText(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> files, TextFiles(path));
  std::string text;
  for (const std::string& file : files) {
    const int64_t room = kMaxTextBytes - static_cast<int64_t>(text.size());
    EK_ASSIGN_OR_RETURN(std::string bytes, ReadFile(file, {.gunzip = true, .max_bytes = room}));
    if (text.empty()) {
      text = std::move(bytes);
    } else {
      text += bytes;
    }
  }
  return std::make_shared<const std::string>(std::move(text));
}

absl::StatusOr<TextDataset> TextDataset::Make(std::shared_ptr<const std::string> text,
                                              const TextOptions& options) {
  if (options.context < 1 || options.context >= kBlock) {
    return absl::InvalidArgumentError(absl::StrCat("a text is held out in blocks of ", kBlock,
                                                   " bytes, which cannot hold a context of ",
                                                   options.context, "; use 1 to ", kBlock - 1));
  }
  const int64_t bytes = static_cast<int64_t>(text->size());
  if (bytes < kHoldOutOf * kBlock) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a text of ", bytes, " bytes is too short: every ", kHoldOutOf, "th block of ", kBlock,
        " bytes is held out for testing, so that ", "at least ", kHoldOutOf * kBlock,
        " bytes are needed; pass a folder or a pattern to join several files"));
  }
  SequencePlan plan = PlanRuns(bytes, options);
  EK_RETURN_IF_ERROR(plan.Check());
  return TextDataset(std::move(text), std::move(plan));
}

Batch TextDataset::Gather(std::span<const int32_t> samples, BatchMemory& memory) const {
  return GatherSequences(plan_, samples, memory,
                         [text = text_->data()](size_t, int64_t position) -> int32_t {
                           return static_cast<uint8_t>(text[position]);
                         });
}

}  // namespace evenkeel
