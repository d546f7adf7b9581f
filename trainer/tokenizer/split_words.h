// Splits a text into the words within which tokens are formed, as GPT-2 does.
//
//   SplitWords("I'm  here, 24h\n", [](absl::string_view word) { ... });
//   // "I", "'m", " ", " here", ",", " 24", "h", "\n"
//
// A word is an English contraction ('s, 't, 're, 've, 'm, 'll, 'd); a run of letters, of digits, or
// of other characters, each with at most one leading space; or a run of white space. If more text
// follows a run of white space, its last character is split off: a space begins the next word, any
// other character is a word of its own. The words are the whole text in order; bytes that are not
// UTF-8 are words of one byte. Letters, digits and white space are those of Unicode 16.0, as in
// Hugging Face's tokenizers 0.22 (unicode_classes.inc), and do not depend on the machine.
//
// Threads: thread-safe.

#ifndef EVENKEEL_TRAINER_TOKENIZER_SPLIT_WORDS_H_
#define EVENKEEL_TRAINER_TOKENIZER_SPLIT_WORDS_H_

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

void SplitWords(absl::string_view text, absl::FunctionRef<void(absl::string_view word)> on_word);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_SPLIT_WORDS_H_
