// Reads and writes tokenizers as Hugging Face's software does.
//
//   EK_ASSIGN_OR_RETURN(const Tokenizer tokenizer, ReadTokenizer("gpt2"));
//   const std::string json = TokenizerJson(tokenizer);          // The contents of tokenizer.json.
//
// Reads tokenizer.json, or else vocab.json with merges.txt beside it; the path is a folder or one
// of the two JSON files. tokenizer.json must describe byte-level BPE as GPT-2 uses it: no
// normalizer, and no tokens added around a text. Files of transformers beside it are read as well
// (tokenizer_config.h): to vocab.json they add tokens; where they contradict tokenizer.json, which
// has all tokens, that is an error. Without them <|endoftext|> in vocab.json becomes an added
// token, and is the beginning and the end of a text.
//
// With add_prefix_space a space is added as Hugging Face's tokenizers do, also after added tokens;
// the class GPT2Tokenizer of transformers 4 adds one to the whole text, whatever it begins with.
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
// Returns the folder of the file, which need not exist, if it has a tokenizer's files; else an
// empty path.
std::string TokenizerBeside(const std::string& file);
std::string TokenizerJson(const Tokenizer& tokenizer);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_FILE_H_
