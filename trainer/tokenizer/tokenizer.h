// Text as tokens: GPT-2's byte-level byte pair encoding.
//
//   // tokenizer_file.h; or LearnTokenizer(texts, 4096), or Tokenizer::OfBytes()
//   EK_ASSIGN_OR_RETURN(const Tokenizer tokenizer, ReadTokenizer("gpt2"));
//   const std::vector<int32_t> tokens = tokenizer.Encode("Once upon a time");
//   for (const int32_t token : tokens) std::cout << tokenizer.piece(token);
//
// A text is split into words (split_words.h), each of which begins as its bytes; then the pair of
// neighbours that comes first in the list of merges becomes one token, until no pair is in the
// list. Added tokens, such as <|endoftext|>, are found in the text before it is split: the leftmost
// first, of those the longest; normalized ones only in the text between the others. Every
// sequence of bytes can be encoded, UTF-8 or not, and the pieces of its tokens are the text again
// (with `adds_space`, plus a space at the beginning and after each added token, where there was
// none).
//
// Threads: immutable.
// Errors:  InvalidArgument from Make() for parts that do not fit together.
// Source:  Radford et al., "Language Models are Unsupervised Multitask Learners", 2.2; equal to
//          Hugging Face's tokenizers 0.22.

#ifndef EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_H_
#define EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

inline constexpr char kEndOfText[] = "<|endoftext|>";

struct AddedToken {
  int32_t token = 0;
  bool is_special = true;      // Hugging Face's software leaves it out of a decoded text.
  bool is_normalized = false;  // Matched after those that are not.

  bool operator==(const AddedToken&) const = default;
};

struct TokenizerParts {
  std::vector<std::string>
      pieces;  // The bytes of each token. Every byte must be one. Empty: unused.
  // Highest priority first; of two equal ones the last counts.
  std::vector<std::pair<int32_t, int32_t>> merges;
  std::vector<AddedToken> added;         // Matched in the text before it is split.
  bool adds_space = false;               // To a text that begins without one.
  std::map<std::string, int32_t> named;  // By the names of Hugging Face's files: "eos_token".
};

class Tokenizer {
 public:
  static absl::StatusOr<Tokenizer> Make(TokenizerParts parts);
  // 256 tokens, each a byte with its value.
  static Tokenizer OfBytes();

  std::vector<int32_t> Encode(absl::string_view text) const;

  int64_t size() const { return static_cast<int64_t>(parts_.pieces.size()); }
  // Returns the bytes of a token; none for a number that is no token.
  absl::string_view piece(int32_t token) const {
    return token >= 0 && token < size() ? absl::string_view(parts_.pieces[token]) : "";
  }
  // Returns the token with that piece, if there is one.
  std::optional<int32_t> Find(absl::string_view piece) const;
  // Returns true if token i is byte i, for all 256.
  bool is_of_bytes() const;
  // Returns the token with that name in `parts().named`, if there is one.
  std::optional<int32_t> Named(const std::string& name) const;
  const TokenizerParts& parts() const { return parts_; }

 private:
  using Pair = std::pair<int32_t, int32_t>;
  struct Merged {
    int32_t order = 0;
    int32_t token = 0;
  };
  // Finds the longest of some texts with which another text begins.
  class Prefixes {
   public:
    explicit Prefixes(std::vector<std::string> texts);
    // Returns its length; 0: there is none.
    size_t LongestOf(absl::string_view text) const;

   private:
    std::vector<std::string> sorted_;
    std::array<bool, 256> begins_ = {};  // By byte: whether one of them begins with it.
  };
  // Words that were encoded already in this call, with their tokens.
  using WordCache = absl::flat_hash_map<std::string, std::vector<int32_t>>;

  Tokenizer() = default;
  // Finds the added tokens of `added_[pass]` and of the passes after it.
  void EncodePart(absl::string_view text, size_t pass, WordCache& cache,
                  std::vector<int32_t>& tokens) const;
  void EncodeWords(absl::string_view text, WordCache& cache, std::vector<int32_t>& tokens) const;
  std::vector<int32_t> EncodeWord(absl::string_view word) const;

  TokenizerParts parts_;
  std::array<int32_t, 256> of_byte_;
  absl::flat_hash_map<Pair, Merged> merges_;
  absl::flat_hash_map<std::string, int32_t> by_piece_;
  std::vector<Prefixes> added_;  // Those that are not normalized; the others.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_H_
