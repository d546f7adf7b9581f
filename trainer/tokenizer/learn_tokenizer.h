// Learns a tokenizer from texts: the pair of neighbouring tokens that is most frequent within words
// becomes a token, until the vocabulary has the requested size.
//
//   EK_ASSIGN_OR_RETURN(const Tokenizer tokenizer, LearnTokenizer(texts, /*vocabulary=*/4096));
//
// The first 256 tokens are the bytes, in GPT-2's order. Among equally frequent pairs the
// one of lower tokens is merged, so that equal texts give equal tokenizers everywhere.
//
// Threads: pure function.
// Errors:  InvalidArgument for a vocabulary below 256, or one for which the texts have too few
//          pairs, with the largest possible size.
// Source:  the same merges as Hugging Face's BpeTrainer with the bytes as initial alphabet.

#ifndef EVENKEEL_TRAINER_TOKENIZER_LEARN_TOKENIZER_H_
#define EVENKEEL_TRAINER_TOKENIZER_LEARN_TOKENIZER_H_

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

absl::StatusOr<Tokenizer> LearnTokenizer(std::span<const absl::string_view> texts,
                                         int64_t vocabulary);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_LEARN_TOKENIZER_H_
