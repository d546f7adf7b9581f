// The files that from_pretrained(FOLDER) of Hugging Face's transformers needs beside
// model.safetensors to open a GPT-2.
//
//   const std::map<std::string, std::string> files = HfFiles(model->options());
//   files.at("config.json");
//   EK_ASSIGN_OR_RETURN(const std::optional<HfConfig> config, ReadHfConfig("gpt2"));
//
// Threads: pure functions; ReadHfConfig() reads files.
// Errors:  InvalidArgument with the path for a config.json that is malformed, or of another model
//          than that of gpt.h.

#ifndef EVENKEEL_TRAINER_GPT_HF_FILES_H_
#define EVENKEEL_TRAINER_GPT_HF_FILES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/gpt/gpt_options.h"

namespace evenkeel {

// Returns the files' contents by name: config.json and generation_config.json; with a tokenizer
// also tokenizer.json and tokenizer_config.json.
std::map<std::string, std::string> HfFiles(const GptOptions& options);

// The settings in the files, and the defaults of transformers where a file lacks them.
struct HfConfig {
  int64_t vocabulary = 0;  // "vocab_size"
  int64_t context = 0;     // "n_positions"
  int64_t width = 0;       // "n_embd"
  int64_t layers = 0;      // "n_layer"
  int64_t heads = 0;       // "n_head"
  TextTokens text_tokens;  // Those of generation_config.json, if it is there.
};

// Returns nullopt if the folder has no config.json.
absl::StatusOr<std::optional<HfConfig>> ReadHfConfig(const std::string& folder);

// Returns `options.text_tokens`, else the tokens that the tokenizer names, if it has any.
TextTokens TextTokensOf(const GptOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_HF_FILES_H_
