// Continues a prompt with a language model, token by token.
//
//   EK_RETURN_IF_ERROR(GenerateTokens(
//       *model, prompt, {.count = 500, .sample = {.temperature = 0.8}, .seed = 7},
//       [](int32_t token) { return Print(token); }));
//
// Equal models, prompts and options give equal tokens.
//
// Threads: thread-compatible; uses the model.
// Errors:  InvalidArgument for options out of their range, an empty prompt (GenerateTokens only),
//          a prompt that the model cannot take, or a beginning that is not in its vocabulary; those
//          of `on_token`, which end the generation.

#ifndef EVENKEEL_TRAINER_GPT_GENERATE_TOKENS_H_
#define EVENKEEL_TRAINER_GPT_GENERATE_TOKENS_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/sample_token.h"

namespace evenkeel {

struct GenerateOptions {
  int64_t count = 500;  // The number of new tokens.
  SampleOptions sample;
  uint64_t seed = 0;
};

absl::Status Validate(const GenerateOptions& options);

// Returns the tokens that a text with that prompt begins with: never none.
absl::StatusOr<std::vector<int32_t>> PromptTokens(const GptOptions& options,
                                                  absl::string_view prompt);

// Calls `on_piece` with the bytes of each new token. The model must have a tokenizer
// (`options().tokenizer`). With an empty prompt the model starts a new text.
absl::Status GenerateText(Gpt& model, absl::string_view prompt, const GenerateOptions& options,
                          absl::FunctionRef<absl::Status(absl::string_view piece)> on_piece);

// Stops early at one of the model's `ends` (hf_files.h).
absl::Status GenerateTokens(Gpt& model, std::vector<int32_t> prompt, const GenerateOptions& options,
                            absl::FunctionRef<absl::Status(int32_t token)> on_token);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GENERATE_TOKENS_H_
