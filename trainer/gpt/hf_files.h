// The files with which other software opens a GPT-2's weights: from_pretrained(FOLDER) of Hugging
// Face's transformers needs them beside model.safetensors.
//
//   const std::map<std::string, std::string> files = HfFiles(model->options());
//   files.at("config.json");
//   EK_ASSIGN_OR_RETURN(const std::optional<int64_t> heads, HeadsInConfig("gpt2"));
//
// Threads: pure functions; HeadsInConfig() reads a file.
// Errors:  InvalidArgument with the path for a config.json that is malformed, or of a model that
//          computes something else than gpt.h.

#ifndef EVENKEEL_TRAINER_GPT_HF_FILES_H_
#define EVENKEEL_TRAINER_GPT_HF_FILES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/gpt/gpt_options.h"

namespace evenkeel {

// Returns the contents of config.json and generation_config.json, with a tokenizer those of
// tokenizer.json and tokenizer_config.json too, by name.
std::map<std::string, std::string> HfFiles(const GptOptions& options);

// Returns the number of heads in the folder's config.json; none without that file.
absl::StatusOr<std::optional<int64_t>> HeadsInConfig(const std::string& folder);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_HF_FILES_H_
