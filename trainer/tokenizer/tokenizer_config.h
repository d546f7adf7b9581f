// The files of Hugging Face's transformers beside a tokenizer, which add tokens to it, name some of
// its tokens, and change how it reads a text.
//
//   EK_ASSIGN_OR_RETURN(const TokenizerConfig config, ReadTokenizerConfig("gpt2"));
//   config.named.at("eos_token");                  // "<|endoftext|>"
//
// Reads tokenizer_config.json and, where that has no added_tokens_decoder, special_tokens_map.json
// and added_tokens.json, as transformers does. None of them need exist: by default <|endoftext|> is
// the beginning and the end of a text.
//
// Errors: InvalidArgument with file and field; the file system's own.

#ifndef EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_CONFIG_H_
#define EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_CONFIG_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

struct TokenizerConfig {
  // Tokens as in tokenizer.json's added_tokens.
  std::map<int64_t, nlohmann::json> added;         // By number.
  std::map<std::string, nlohmann::json> specials;  // By content; they must have a number elsewhere.
  std::map<std::string, std::string> named;        // Contents by name, "bos_token".
  std::optional<bool> adds_space;
  std::string path;  // The last file that was there; "": none.
};

absl::StatusOr<TokenizerConfig> ReadTokenizerConfig(const std::string& folder);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_TOKENIZER_CONFIG_H_
