#include "evenkeel/trainer/tokenizer/split_words.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "evenkeel/comm/base/json.h"

namespace evenkeel {
namespace {

// "L26O6": 26 letters, then 6 other characters.
constexpr absl::string_view kRuns =
#include "evenkeel/trainer/tokenizer/unicode_classes.inc"
    ;

constexpr char kSpace = 'S';
constexpr char kNotUtf8 = 'B';

// Returns the class of each character of Unicode.
std::vector<char> Classes() {
  std::vector<char> classes;
  for (absl::string_view runs = kRuns; !runs.empty();) {
    const size_t digits = runs.substr(1).find_first_not_of("0123456789");
    size_t count = 0;
    (void)absl::SimpleAtoi(runs.substr(1, digits), &count);
    classes.insert(classes.end(), count, runs[0]);
    runs.remove_prefix(digits == absl::string_view::npos ? runs.size() : 1 + digits);
  }
  return classes;
}

struct Character {
  char kind = kNotUtf8;
  size_t size = 1;
};

// Returns the first character of the text, or a byte that is none.
Character FirstOf(absl::string_view text) {
  static const auto& kClasses = *new std::vector<char>(Classes());  // Never destroyed.
  const size_t size = internal::Utf8Size(text);
  if (size == 0) return {};
  uint32_t character = static_cast<uint8_t>(text[0]);
  if (size > 1) character &= 0x7f >> size;
  for (const char byte : text.substr(1, size - 1)) character = (character << 6) | (byte & 0x3f);
  return {kClasses[character], size};
}

// GPT-2's expression is 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+.
size_t FirstWordOf(absl::string_view text) {
  for (const absl::string_view contraction : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (absl::StartsWith(text, contraction)) return contraction.size();
  }
  size_t size = text.size() > 1 && text[0] == ' ' ? 1 : 0;
  Character first = FirstOf(text.substr(size));
  if (size == 1 && (first.kind == kSpace || first.kind == kNotUtf8)) {
    size = 0;
    first = FirstOf(text);
  }
  size_t last = size;  // The beginning of the run's last character.
  size += first.size;
  while (first.kind != kNotUtf8 && size < text.size()) {
    const Character next = FirstOf(text.substr(size));
    if (next.kind != first.kind) return first.kind == kSpace && last > 0 ? last : size;
    last = size;
    size += next.size;
  }
  return size;
}

}  // namespace

void SplitWords(absl::string_view text, absl::FunctionRef<void(absl::string_view word)> on_word) {
  while (!text.empty()) {
    const size_t size = FirstWordOf(text);
    on_word(text.substr(0, size));
    text.remove_prefix(size);
  }
}

}  // namespace evenkeel
