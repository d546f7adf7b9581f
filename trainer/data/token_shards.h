// Tokenized text in the file format of llm.c, such as FineWeb.
//
//   EK_ASSIGN_OR_RETURN(const TokenShards train,
//                       TokenShards::Open("data/fineweb_train_*.bin", {.context = 1024}));
//   EK_ASSIGN_OR_RETURN(const TokenShards test,
//                       TokenShards::Open("data/fineweb_val_*.bin", {.context = 1024}));
//
// A shard begins with 256 numbers of 32 bits, of which the first three are used: 20240520, the
// version 1, the number of tokens. The tokens follow, 16 bits each; everything is little-endian.
// Files are mapped: only the samples of the sampler are read from the disk.
//
// A sequence never spans two shards; each shard is cut into sequences (sequences.h), so that
// nothing is dropped.
//
// Open() checks the header of each shard and its first 65,536 tokens, which must be below the
// vocabulary: enough to detect a wrong tokenizer without reading a hundred gigabytes. The model
// checks later tokens, and returns InvalidArgument for a batch with a token out of range (batch.h).
//
// Threads: immutable.
// Errors:  NotFound without a file; InvalidArgument, with its path, for a file that is not a shard
//          or has a different version, another length than its header, no sequence, or a token
//          beyond the vocabulary. Files must not become shorter while they are used
//          (mapped_file.h).

#ifndef EVENKEEL_TRAINER_DATA_TOKEN_SHARDS_H_
#define EVENKEEL_TRAINER_DATA_TOKEN_SHARDS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/files/mapped_file.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/sequences.h"

namespace evenkeel {

inline constexpr int64_t kGpt2Vocabulary = 50257;

struct TokenShardsOptions {
  int64_t context = 0;  // Positive.
  int64_t vocabulary = kGpt2Vocabulary;
};

class TokenShards : public Dataset {
 public:
  // `path`: a shard, a pattern or a folder that contains only shards (file_list.h).
  static absl::StatusOr<TokenShards> Open(const std::string& path,
                                          const TokenShardsOptions& options);

  int64_t size() const override { return plan_.size(); }
  int64_t predictions_per_sample() const override { return plan_.context(); }
  absl::Status Explain(const absl::Status& error, std::span<const int32_t> samples) const override;
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  explicit TokenShards(int64_t context) : plan_(context) {}

  std::vector<std::string> names_;  // Of the files.
  std::vector<MappedFile> files_;
  SequencePlan plan_;  // A run is a file's tokens.
};

// Returns true if these are the first bytes of a shard of any version.
bool BeginsAsTokenShard(absl::string_view bytes);

// Returns an error for the first bytes of llm.c's other files, such as Llama's tokens.
absl::Status CheckIsNoOtherShard(absl::string_view bytes);

// Returns the tokens of a shard, two bytes each.
absl::StatusOr<absl::string_view> TokensOfShard(absl::string_view file);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_TOKEN_SHARDS_H_
