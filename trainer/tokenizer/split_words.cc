#include "evenkeel/trainer/tokenizer/split_words.h"

#include <cstddef>

#include "absl/strings/ascii.h"
#include "re2/re2.h"

namespace evenkeel {
namespace {

// White space of Unicode, as members of a character class.
#define EK_SPACE R"(\t\n\v\f\r\x{85}\pZ)"

// GPT-2's expression has two alternatives for white space, of which the first looks ahead:
// \s+(?!\S)|\s+. RE2, which takes a time linear in the text, cannot look ahead; SplitWords() does.
constexpr char kWord[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\pL+| ?\pN+| ?[^)" EK_SPACE R"(\pL\pN]+|[)" EK_SPACE "]+";

// Returns the last character of valid UTF-8.
absl::string_view LastCharacter(absl::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (text[begin] & 0xc0) == 0x80) --begin;
  return text.substr(begin);
}

bool IsSpace(absl::string_view character) {
  static const RE2* const kSpace = new RE2("[" EK_SPACE "]");  // Never destroyed.
  if (absl::ascii_isascii(character[0])) return absl::ascii_isspace(character[0]);
  return RE2::FullMatch(re2::StringPiece(character.data(), character.size()), *kSpace);
}

}  // namespace

void SplitWords(absl::string_view text, absl::FunctionRef<void(absl::string_view word)> on_word) {
  static const RE2* const kPattern = new RE2(kWord);  // Never destroyed.
  while (!text.empty()) {
    re2::StringPiece match;
    size_t size = 1;
    if (kPattern->Match(re2::StringPiece(text.data(), text.size()), 0, text.size(),
                        RE2::ANCHOR_START, &match, 1)) {
      size = match.size();
      // Only white space ends with white space.
      const absl::string_view last = LastCharacter(text.substr(0, size));
      if (size < text.size() && last.size() < size && IsSpace(last)) size -= last.size();
    }
    on_word(text.substr(0, size));
    text.remove_prefix(size);
  }
}

}  // namespace evenkeel
