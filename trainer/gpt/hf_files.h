// The files that from_pretrained(FOLDER) of Hugging Face's transformers needs beside
// model.safetensors to open a GPT-2.
//
//   const std::map<std::string, std::string> files = HfFiles(model->options());
//   files.at("config.json");
//   EK_ASSIGN_OR_RETURN(const std::optional<int64_t> heads, HeadsInConfig("gpt2"));
//
// Threads: pure functions; HeadsInConfig() reads a file.
// Errors:  InvalidArgument with the path for a config.json that is malformed, or of a GPT-2 that
//          differs from the model of gpt.h.

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

// Returns the number of heads in the folder's config.json; nullopt if there is no such file, it
// describes another kind of model, or it has no n_head.
absl::StatusOr<std::optional<int64_t>> HeadsInConfig(const std::string& folder);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_HF_FILES_H_
