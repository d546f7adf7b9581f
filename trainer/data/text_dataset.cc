#include "evenkeel/trainer/data/text_dataset.h"

#include <unistd.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/file_list.h"
#include "evenkeel/trainer/data/unpack.h"

namespace evenkeel {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{16} << 30;

bool IsThere(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

int64_t BlockOf(const TextOptions& options) {
  // More than the mean of ordinary texts; Check() reports others.
  constexpr int64_t kBytesPerToken = 16;
  if (options.tokenizer == nullptr) return TextDataset::kBlock;
  return std::max(TextDataset::kBlock, kBytesPerToken * options.context);
}

// Returns the mean number of bytes of the tokens that the sequences predict.
double BytesPerPrediction(const SequencePlan& plan, std::span<const int32_t> tokens,
                          const Tokenizer& tokenizer) {
  double bytes = 0;
  for (int64_t sequence = 0; sequence < plan.size(); ++sequence) {
    for (const int32_t token : tokens.subspan(plan.At(sequence).begin + 1, plan.context()))
      bytes += static_cast<double>(tokenizer.piece(token).size());
  }
  return bytes / static_cast<double>(plan.size() * plan.context());
}

}  // namespace

absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& path) {
  if (!IsThere(path) && IsThere(path + ".gz")) return std::vector<std::string>{path + ".gz"};
  if (path != kJargonFile || IsThere(path)) return FilesAt(path);
  return absl::NotFoundError(
      absl::StrCat("no file ", path, ", plain or .gz;  Debian's package jargon-text ",
                   "installs it, unless dpkg is configured to exclude /usr/share/doc"));
}

absl::StatusOr<std::shared_ptr<const std::string>> LoadText(const std::string& path, Zeros zeros) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> files, TextFiles(path));
  std::string text;
  for (const std::string& file : files) {
    const int64_t room = kMaxTextBytes - static_cast<int64_t>(text.size());
    EK_ASSIGN_OR_RETURN(std::string bytes, ReadUnpacked(file, room));
    if (const size_t zero = bytes.find('\0'); zero != bytes.npos && zeros == Zeros::kRefuse) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, " is not a text: byte ", zero,
                       " is zero; pass --data_kind=bytes to use it anyway"));
    }
    if (text.empty()) {
      text = std::move(bytes);
    } else {
      text += bytes;
    }
  }
  return std::make_shared<const std::string>(std::move(text));
}

// The blocks of a split, adjacent ones as one run.
absl::StatusOr<std::vector<absl::string_view>> TextDataset::RunsOf(absl::string_view text,
                                                                   const TextOptions& options) {
  const int64_t bytes = static_cast<int64_t>(text.size());
  const int64_t block_bytes = BlockOf(options);
  if (options.context < 1 || options.context >= block_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a text is held out in blocks of ", block_bytes, " bytes, which cannot hold a context of ",
        options.context, "; use 1 to ", block_bytes - 1));
  }
  if (bytes < kHoldOutOf * block_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a text of ", bytes, " bytes is too short: every ", kHoldOutOf, "th block of ", block_bytes,
        " bytes is held out for testing, so that ", "at least ", kHoldOutOf * block_bytes,
        " bytes are needed; pass a folder or a pattern to join several files"));
  }
  const int64_t blocks = bytes / block_bytes;
  std::vector<absl::string_view> runs;
  const auto add = [&](int64_t from, int64_t to) {  // Blocks.
    const int64_t end = to == blocks ? bytes : to * block_bytes;
    runs.push_back(text.substr(from * block_bytes, end - from * block_bytes));
  };
  for (int64_t block = 0; block < blocks; block += kHoldOutOf) {
    const int64_t held_out = block + kHoldOutOf - 1;
    if (options.split == Split::kTrain) {
      add(block, std::min(held_out, blocks));
    } else if (held_out < blocks) {
      add(held_out, held_out + 1);
    }
  }
  return runs;
}

absl::StatusOr<TextDataset> TextDataset::Make(std::shared_ptr<const std::string> text,
                                              const TextOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::vector<absl::string_view> runs, RunsOf(*text, options));
  TextDataset made(options.context);
  for (const absl::string_view run : runs) {
    if (options.tokenizer == nullptr) {
      made.plan_.AddRun(
          {.begin = run.data() - text->data(), .tokens = static_cast<int64_t>(run.size())});
      continue;
    }
    const std::vector<int32_t> tokens = options.tokenizer->Encode(run);
    made.plan_.AddRun({.begin = static_cast<int64_t>(made.tokens_.size()),
                       .tokens = static_cast<int64_t>(tokens.size())});
    made.tokens_.insert(made.tokens_.end(), tokens.begin(), tokens.end());
  }
  EK_RETURN_IF_ERROR(made.plan_.Check());
  if (options.tokenizer == nullptr) {
    made.text_ = std::move(text);
  } else {
    made.bytes_per_prediction_ = BytesPerPrediction(made.plan_, made.tokens_, *options.tokenizer);
  }
  return made;
}

int64_t TextDataset::held_bytes() const {
  // Both splits use the text.
  const int64_t text =
      text_ == nullptr ? 0 : static_cast<int64_t>(text_->size()) / text_.use_count();
  return text + static_cast<int64_t>(tokens_.size() * sizeof(tokens_[0]));
}

Batch TextDataset::Gather(std::span<const int32_t> samples, BatchMemory& memory) const {
  if (text_ == nullptr) {
    return GatherSequences(plan_, samples, memory,
                           [this](size_t, int64_t position) { return tokens_[position]; });
  }
  return GatherSequences(plan_, samples, memory,
                         [text = text_->data()](size_t, int64_t position) -> int32_t {
                           return static_cast<uint8_t>(text[position]);
                         });
}

}  // namespace evenkeel
