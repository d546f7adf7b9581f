// Reads and writes tokenizers as Hugging Face's software does.
//
//   EK_ASSIGN_OR_RETURN(const Tokenizer tokenizer, ReadTokenizer("gpt2"));
//   const std::string json = TokenizerJson(tokenizer);          // The contents of tokenizer.json.
//
// Read are tokenizer.json, or vocab.json with merges.txt beside it; a folder has one of these.
// tokenizer.json must be GPT-2's kind: byte pair encoding of bytes, no normalizer, no prefixes,
// suffixes or other tokens around a text. vocab.json's <|endoftext|> is an added token.
//
// Threads: thread-safe.
// Errors:  NotFound with the folder and the files it lacks; InvalidArgument with the file for one
//          that is malformed or of another kind; the file system's own.

#ifndef EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_FILE_H_
#define EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

absl::StatusOr<Tokenizer> ReadTokenizer(const std::string& path);
// Whether ReadTokenizer() would find a tokenizer in this folder.
bool HasTokenizer(const std::string& folder);
std::string TokenizerJson(const Tokenizer& tokenizer);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_FILE_H_
