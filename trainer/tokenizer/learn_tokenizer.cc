#include "evenkeel/trainer/tokenizer/learn_tokenizer.h"

#include <cstddef>
#include <optional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/tokenizer/gpt2_bytes.h"
#include "evenkeel/trainer/tokenizer/split_words.h"

namespace evenkeel {
namespace {

using Pair = std::pair<int32_t, int32_t>;

struct Word {
  std::vector<int32_t> tokens;
  int64_t count = 0;
};

std::vector<Word> CountWords(std::span<const absl::string_view> texts) {
  absl::flat_hash_map<absl::string_view, int64_t> counts;
  for (const absl::string_view text : texts)
    SplitWords(text, [&](absl::string_view word) { ++counts[word]; });
  std::vector<Word> words;
  for (const auto& [text, count] : counts) {
    Word& word = words.emplace_back(Word{.tokens = {}, .count = count});
    for (const char byte : text) word.tokens.push_back(Gpt2Order(static_cast<uint8_t>(byte)));
  }
  return words;
}

// The pairs of neighbours in the words, and merges of them.
class Pairs {
 public:
  explicit Pairs(std::vector<Word> words) : words_(std::move(words)) {
    for (size_t word = 0; word < words_.size(); ++word) {
      for (size_t i = 0; i + 1 < words_[word].tokens.size(); ++i)
        Add(word, {words_[word].tokens[i], words_[word].tokens[i + 1]}, words_[word].count);
    }
    PushNewPairs();
  }

  // Returns the most frequent pair and makes it `token` everywhere; nothing if there is none.
  std::optional<Pair> Merge(int32_t token) {
    while (!queue_.empty()) {
      const auto [count, reversed] = queue_.top();
      queue_.pop();
      const Pair pair = Reversed(reversed);
      const auto found = pairs_.find(pair);
      if (found == pairs_.end() || found->second.count <= 0) continue;
      if (found->second.count != count) {  // Merges have taken some of them since.
        queue_.push({found->second.count, reversed});
        continue;
      }
      const std::vector<size_t> words = std::move(found->second.words);
      for (const size_t word : words) MergeIn(word, pair, token);
      pairs_.erase(pair);
      PushNewPairs();
      return pair;
    }
    return std::nullopt;
  }

 private:
  struct PairStats {
    int64_t count = 0;
    std::vector<size_t> words;  // Contain or contained the pair; may have duplicates.
  };
  // Negated, so that among equal counts the lowest pair is on top.
  static Pair Reversed(Pair pair) { return {-pair.first, -pair.second}; }

  void PushNewPairs() {
    for (const Pair& pair : new_pairs_) queue_.push({pairs_[pair].count, Reversed(pair)});
    new_pairs_.clear();
  }

  void Add(size_t word, Pair pair, int64_t count) {
    const auto [found, is_new] = pairs_.try_emplace(pair);
    found->second.count += count;
    if (count > 0 && (found->second.words.empty() || found->second.words.back() != word))
      found->second.words.push_back(word);
    if (is_new) new_pairs_.push_back(pair);
  }

  void MergeIn(size_t index, Pair pair, int32_t token) {
    const std::vector<int32_t> tokens = std::exchange(words_[index].tokens, {});
    std::vector<int32_t>& merged = words_[index].tokens;
    const int64_t count = words_[index].count;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i + 1 == tokens.size() || Pair(tokens[i], tokens[i + 1]) != pair) {
        merged.push_back(tokens[i]);
        continue;
      }
      if (!merged.empty()) {
        Add(index, {merged.back(), pair.first}, -count);
        Add(index, {merged.back(), token}, count);
      }
      merged.push_back(token);
      ++i;
      if (i + 1 < tokens.size()) {
        Add(index, {pair.second, tokens[i + 1]}, -count);
        Add(index, {token, tokens[i + 1]}, count);
      }
    }
  }

  std::vector<Word> words_;
  absl::flat_hash_map<Pair, PairStats> pairs_;
  std::vector<Pair> new_pairs_;  // New in pairs_, not in the queue yet.
  // Counts may be out of date; the current one is never higher.
  std::priority_queue<std::pair<int64_t, Pair>> queue_;
};

}  // namespace

absl::StatusOr<Tokenizer> LearnTokenizer(std::span<const absl::string_view> texts,
                                         int64_t vocabulary) {
  TokenizerParts parts;
  parts.pieces.resize(256);
  for (int byte = 0; byte < 256; ++byte)
    parts.pieces[Gpt2Order(static_cast<uint8_t>(byte))] = std::string(1, static_cast<char>(byte));
  if (vocabulary < 256) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a vocabulary of ", vocabulary, " is too small: each of the 256 bytes is a token"));
  }
  Pairs pairs(CountWords(texts));
  while (static_cast<int64_t>(parts.pieces.size()) < vocabulary) {
    const auto pair = pairs.Merge(static_cast<int32_t>(parts.pieces.size()));
    if (!pair.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the text yields at most ", parts.pieces.size(), " tokens, fewer than the vocabulary of ",
          vocabulary, "; pass a smaller one, or more text"));
    }
    parts.merges.push_back(*pair);
    parts.pieces.push_back(absl::StrCat(parts.pieces[pair->first], parts.pieces[pair->second]));
  }
  return Tokenizer::Make(std::move(parts));
}

}  // namespace evenkeel
