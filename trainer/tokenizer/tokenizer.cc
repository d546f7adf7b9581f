#include "evenkeel/trainer/tokenizer/tokenizer.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <queue>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/tokenizer/split_words.h"

namespace evenkeel {
namespace {

// Limits of the cache of encoded words.
constexpr size_t kMaxCachedWordBytes = 64;  // Bytes.
constexpr size_t kMaxCachedWords = 1 << 18;

uint8_t ByteAt(absl::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }

}  // namespace

Tokenizer::Prefixes::Prefixes(std::vector<std::string> texts) : sorted_(std::move(texts)) {
  std::ranges::sort(sorted_);
  for (const std::string& text : sorted_) begins_[ByteAt(text, 0)] = true;
}

size_t Tokenizer::Prefixes::LongestOf(absl::string_view text) const {
  if (!begins_[ByteAt(text, 0)]) return 0;
  while (true) {
    const auto after = std::ranges::upper_bound(sorted_, text);
    if (after == sorted_.begin()) return 0;
    // No text after `last` is a prefix. If `last` is not one, the prefixes are those of the part
    // that both have in common.
    const std::string& last = *(after - 1);
    if (absl::StartsWith(text, last)) return last.size();
    text = text.substr(0, std::ranges::mismatch(text, last).in1 - text.begin());
  }
}

absl::StatusOr<Tokenizer> Tokenizer::Make(TokenizerParts parts) {
  Tokenizer made;
  if (parts.pieces.size() > std::numeric_limits<int32_t>::max())
    return absl::InvalidArgumentError(absl::StrCat(parts.pieces.size(), " tokens are too many"));
  made.of_byte_.fill(-1);
  for (size_t token = 0; token < parts.pieces.size(); ++token) {
    const std::string& piece = parts.pieces[token];
    if (piece.empty()) continue;
    const auto [at, is_new] = made.by_piece_.insert({piece, static_cast<int32_t>(token)});
    if (!is_new) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens ", at->second, " and ", token, " have the same bytes"));
    }
    if (piece.size() == 1) made.of_byte_[static_cast<uint8_t>(piece[0])] = at->second;
  }
  const auto is_token = [&](int32_t token) {
    return token >= 0 && token < static_cast<int64_t>(parts.pieces.size());
  };
  std::vector<std::string> added[2];
  for (const AddedToken& one : parts.added) {
    if (!is_token(one.token) || parts.pieces[one.token].empty())
      return absl::InvalidArgumentError(absl::StrCat("added token ", one.token, " has no bytes"));
    added[one.is_normalized].push_back(parts.pieces[one.token]);
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (made.of_byte_[byte] >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("no token stands for byte ", byte, "; each of the 256 bytes needs one"));
  }
  int32_t order = -1;
  for (const auto& [left, right] : parts.merges) {
    ++order;
    if (!is_token(left) || !is_token(right)) {
      return absl::InvalidArgumentError(absl::StrCat("merge ", order, " joins tokens ", left,
                                                     " and ", right, ", but there are only ",
                                                     parts.pieces.size(), " tokens"));
    }
    const std::string piece = absl::StrCat(parts.pieces[left], parts.pieces[right]);
    const auto token = made.by_piece_.find(piece);
    if (token == made.by_piece_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("merge ", order, " yields \"", piece, "\", which is not in the vocabulary"));
    }
    made.merges_.insert_or_assign({left, right}, Merged{order, token->second});
  }
  for (std::vector<std::string>& texts : added) {
    if (!texts.empty()) made.added_.emplace_back(std::move(texts));
  }
  made.parts_ = std::move(parts);
  return made;
}

Tokenizer Tokenizer::OfBytes() {
  TokenizerParts parts;
  for (int byte = 0; byte < 256; ++byte) parts.pieces.emplace_back(1, static_cast<char>(byte));
  return *Make(std::move(parts));
}

bool Tokenizer::is_of_bytes() const {
  const bool has_values = std::ranges::is_sorted(of_byte_);
  return size() == 256 && has_values && !parts_.adds_space && parts_.added.empty();
}

std::optional<int32_t> Tokenizer::Find(absl::string_view piece) const {
  const auto found = by_piece_.find(piece);
  return found == by_piece_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<int32_t> Tokenizer::Named(const std::string& name) const {
  const auto found = parts_.named.find(name);
  return found == parts_.named.end() ? std::nullopt : std::optional(found->second);
}

std::vector<int32_t> Tokenizer::Encode(absl::string_view text) const {
  std::vector<int32_t> tokens;
  WordCache cache;
  EncodePart(text, 0, cache, tokens);
  return tokens;
}

void Tokenizer::EncodePart(absl::string_view text, size_t pass, WordCache& cache,
                           std::vector<int32_t>& tokens) const {
  if (pass == added_.size()) return EncodeWords(text, cache, tokens);
  size_t begin = 0;  // Of what is not encoded yet.
  for (size_t at = 0; at < text.size();) {
    const size_t size = added_[pass].LongestOf(text.substr(at));
    if (size == 0) {
      ++at;
      continue;
    }
    EncodePart(text.substr(begin, at - begin), pass + 1, cache, tokens);
    tokens.push_back(*Find(text.substr(at, size)));
    begin = at += size;
  }
  EncodePart(text.substr(begin), pass + 1, cache, tokens);
}

void Tokenizer::EncodeWords(absl::string_view text, WordCache& cache,
                            std::vector<int32_t>& tokens) const {
  std::string with_space;
  if (parts_.adds_space && !text.empty() && text[0] != ' ') {
    with_space = absl::StrCat(" ", text);
    text = with_space;
  }
  SplitWords(text, [&](absl::string_view word) {
    if (const auto found = cache.find(word); found != cache.end()) {
      tokens.insert(tokens.end(), found->second.begin(), found->second.end());
      return;
    }
    std::vector<int32_t> encoded = EncodeWord(word);
    tokens.insert(tokens.end(), encoded.begin(), encoded.end());
    if (word.size() <= kMaxCachedWordBytes && cache.size() < kMaxCachedWords)
      cache.emplace(word, std::move(encoded));
  });
}

std::vector<int32_t> Tokenizer::EncodeWord(absl::string_view word) const {
  // A linked list of tokens and a priority queue of the possible merges, so that a word of n bytes
  // takes O(n log n) time.
  struct Part {
    int32_t token;
    int32_t before;  // Positions; out of range at the ends.
    int32_t after;
  };
  const int32_t size = static_cast<int32_t>(word.size());
  std::vector<Part> list(size);
  for (int32_t i = 0; i < size; ++i)
    list[i] = {of_byte_[static_cast<uint8_t>(word[i])], i - 1, i + 1};

  using Candidate = std::tuple<int32_t, int32_t, Pair, int32_t>;  // Order, position, pair, token.
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto consider = [&](int32_t at) {
    if (at < 0 || list[at].after >= size) return;
    const Pair pair = {list[at].token, list[list[at].after].token};
    if (const auto merge = merges_.find(pair); merge != merges_.end())
      queue.push({merge->second.order, at, pair, merge->second.token});
  };
  for (int32_t i = 0; i < size; ++i) consider(i);
  while (!queue.empty()) {
    const auto [order, at, pair, token] = queue.top();
    queue.pop();
    const int32_t after = list[at].after;
    // Another merge has changed one of the two since.
    if (list[at].token != pair.first || after >= size || list[after].token != pair.second) continue;
    list[at] = {token, list[at].before, list[after].after};
    list[after].token = -1;
    if (list[at].after < size) list[list[at].after].before = at;
    consider(list[at].before);
    consider(at);
  }
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < size; i = list[i].after) tokens.push_back(list[i].token);
  return tokens;
}

}  // namespace evenkeel
