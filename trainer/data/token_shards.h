// Text that has been turned into tokens beforehand, in the files that llm.c writes and reads: FineWeb and the like.
//
//   EK_ASSIGN_OR_RETURN(const TokenShards train,
//                       TokenShards::Open("data/fineweb_train_*.bin", {.context = 1024}));
//   EK_ASSIGN_OR_RETURN(const TokenShards test, TokenShards::Open("data/fineweb_val_*.bin", {.context = 1024}));
//
// A shard begins with 256 numbers of 32 bits, of which the first three count: 20240520, the version 1, how many tokens
// follow. Then come the tokens, 16 bits each; all is little-endian. Files are mapped, not read: what the sampler
// deals out is what comes from the disk.
//
// A sequence never spans two shards; each shard is cut into sequences as sequences.h says, so that nothing is dropped.
//
// Open looks at the header of each shard and at its first 65,536 tokens, which must be below the vocabulary: enough to
// notice the wrong tokenizer, and no reason to read a hundred gigabytes. Tokens further on are the model's to check,
// which answers InvalidArgument for a batch that has one too high (batch.h).
//
// Threads: immutable.
// Errors:  NotFound without a file; InvalidArgument, with its path, for a file that is no shard, of another version,
//          shorter or longer than its header says, without a sequence, or with a token beyond the vocabulary. Files
//          must not become shorter while they are used (mapped_file.h).

#ifndef EVENKEEL_TRAINER_DATA_TOKEN_SHARDS_H_
#define EVENKEEL_TRAINER_DATA_TOKEN_SHARDS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/data/mapped_file.h"
#include "evenkeel/trainer/data/sequences.h"
#include "evenkeel/trainer/dataset.h"

namespace evenkeel {

inline constexpr int64_t kGpt2Vocabulary = 50257;

struct TokenShardsOptions {
  int64_t context = 0;  // Positive.
  int64_t vocabulary = kGpt2Vocabulary;
};

class TokenShards : public Dataset {
 public:
  // A shard's name, a pattern or a folder of nothing but shards (file_list.h).
  static absl::StatusOr<TokenShards> Open(const std::string& path, const TokenShardsOptions& options);

  int64_t size() const override { return plan_.size(); }
  int64_t predictions_per_sample() const override { return plan_.context(); }
  int64_t vocabulary() const { return vocabulary_; }
  int64_t tokens() const { return tokens_; }  // Of all shards.
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  explicit TokenShards(const TokenShardsOptions& options) : plan_(options.context), vocabulary_(options.vocabulary) {}

  std::vector<MappedFile> files_;
  SequencePlan plan_;  // A run is a file's tokens.
  int64_t vocabulary_;
  int64_t tokens_ = 0;
};

// Whether these are the first bytes of a shard, of whatever version.
bool BeginsAsTokenShard(absl::string_view bytes);

// The tokens of a shard, two bytes each.
absl::StatusOr<absl::string_view> TokensOfShard(absl::string_view file);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TOKEN_SHARDS_H_
