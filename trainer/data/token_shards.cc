#include "evenkeel/trainer/data/token_shards.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/file_list.h"

namespace evenkeel {
namespace {

constexpr size_t kHeaderBytes = 256 * 4;
constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;
constexpr int64_t kTokensLookedAt = 65536;

uint8_t ByteAt(absl::string_view bytes, size_t position) {
  return static_cast<uint8_t>(bytes[position]);
}

// Returns number `index` of the header.
int32_t HeaderAt(absl::string_view file, size_t index) {
  return internal::ByteReader(file.substr(4 * index)).I32();
}

int32_t TokenAt(absl::string_view tokens, int64_t position) {
  return ByteAt(tokens, 2 * position) | ByteAt(tokens, 2 * position + 1) << 8;
}

int64_t TokenCount(absl::string_view tokens) { return static_cast<int64_t>(tokens.size() / 2); }

absl::Status CheckFirstTokens(absl::string_view tokens, int64_t vocabulary) {
  const int64_t looked_at = std::min(TokenCount(tokens), kTokensLookedAt);
  for (int64_t i = 0; i < looked_at; ++i) {
    const int32_t token = TokenAt(tokens, i);
    if (token < vocabulary) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token ", i, " is ", token, ", not below the vocabulary of ", vocabulary));
  }
  return absl::OkStatus();
}

absl::Status CheckShard(absl::string_view file, const TokenShardsOptions& options) {
  EK_ASSIGN_OR_RETURN(const absl::string_view tokens, TokensOfShard(file));
  if (TokenCount(tokens) - 1 < options.context) {
    return absl::InvalidArgumentError(absl::StrCat(
        "has ", TokenCount(tokens), " tokens, too few for a context of ", options.context,
        " with its targets; use a shorter context or ", "leave the shard out"));
  }
  return CheckFirstTokens(tokens, options.vocabulary);
}

}  // namespace

bool BeginsAsTokenShard(absl::string_view bytes) {
  return bytes.size() >= 4 && HeaderAt(bytes, 0) == kMagic;
}

absl::Status CheckIsNoOtherShard(absl::string_view bytes) {
  // llm.c's magic numbers are dates of 2024.
  const int32_t begin = bytes.size() >= kHeaderBytes ? HeaderAt(bytes, 0) : 0;
  if (begin < 20240101 || begin > 20241231 || begin == kMagic) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "is another file type of llm.c (magic number ", begin, "; 20240801 is Llama 3's ",
      "tokens); only shards of GPT-2's tokens (", kMagic, ") are supported"));
}

absl::StatusOr<absl::string_view> TokensOfShard(absl::string_view file) {
  if (file.size() >= 4 && !BeginsAsTokenShard(file)) {
    return absl::InvalidArgumentError(
        absl::StrCat("is not a token shard: it begins with ", HeaderAt(file, 0), ", not ", kMagic));
  }
  if (file.size() < kHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a token shard's header has ", kHeaderBytes,
                                                   " bytes, this file has ", file.size()));
  }
  if (HeaderAt(file, 1) != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("is a token shard of version ", HeaderAt(file, 1), ", not ", kVersion));
  }
  const int64_t expected = 2 * int64_t{HeaderAt(file, 2)};
  const int64_t found = static_cast<int64_t>(file.size() - kHeaderBytes);
  if (expected == found) return file.substr(kHeaderBytes);
  return absl::InvalidArgumentError(
      absl::StrCat("is too ", found < expected ? "short" : "long", ": ", HeaderAt(file, 2),
                   " tokens of 2 bytes should follow the header, ", found, " bytes do"));
}

absl::StatusOr<TokenShards> TokenShards::Open(const std::string& path,
                                              const TokenShardsOptions& options) {
  if (options.context < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a context must have at least 1 token, got ", options.context));
  }
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, FilesAt(path));
  TokenShards shards(options.context);
  for (const std::string& name : names) {
    EK_ASSIGN_OR_RETURN(MappedFile file, MapFile(name));
    EK_RETURN_IF_ERROR(Annotate(CheckShard(*file, options), name));
    shards.plan_.AddRun({.begin = 0, .tokens = TokenCount(file->substr(kHeaderBytes))});
    shards.files_.push_back(std::move(file));
    shards.names_.push_back(name);
  }
  EK_RETURN_IF_ERROR(Annotate(shards.plan_.Check(), path));
  return shards;
}

Batch TokenShards::Gather(std::span<const int32_t> samples, BatchMemory& memory) const {
  return GatherSequences(plan_, samples, memory, [this](size_t file, int64_t position) {
    return TokenAt(files_[file]->substr(kHeaderBytes), position);
  });
}

absl::Status TokenShards::Explain(const absl::Status& error,
                                  std::span<const int32_t> samples) const {
  std::set<std::string> names;
  for (const int32_t sample : samples) names.insert(names_[plan_.At(sample).run]);
  return Annotate(error, absl::StrJoin(names, ", "));
}

}  // namespace evenkeel
