#include "evenkeel/trainer/gpt/generate_tokens.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/gpt/hf_files.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

absl::Status Validate(const GenerateOptions& options) {
  if (options.count >= 0) return Validate(options.sample);
  return absl::InvalidArgumentError(
      absl::StrCat("the number of tokens, ", options.count, ", must not be negative"));
}

absl::StatusOr<std::vector<int32_t>> PromptTokens(const GptOptions& options,
                                                  absl::string_view prompt) {
  std::vector<int32_t> tokens = options.tokenizer->Encode(prompt);
  if (!tokens.empty()) return tokens;
  // Without a token that begins a text, it follows a newline.
  const int64_t begin = TextTokensOf(options).begin.value_or(*options.tokenizer->Find("\n"));
  if (begin >= 0 && begin < options.vocabulary)
    return std::vector<int32_t>{static_cast<int32_t>(begin)};
  return absl::InvalidArgumentError(absl::StrCat("bos_token_id, with which a text begins, is ",
                                                 begin, ", but the model has only ",
                                                 options.vocabulary, " tokens; pass a prompt"));
}

absl::Status GenerateText(Gpt& model, absl::string_view prompt, const GenerateOptions& options,
                          absl::FunctionRef<absl::Status(absl::string_view piece)> on_piece) {
  EK_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, PromptTokens(model.options(), prompt));
  const Tokenizer& tokenizer = *model.options().tokenizer;
  return GenerateTokens(model, std::move(tokens), options,
                        [&](int32_t token) { return on_piece(tokenizer.piece(token)); });
}

absl::Status GenerateTokens(Gpt& model, std::vector<int32_t> prompt, const GenerateOptions& options,
                            absl::FunctionRef<absl::Status(int32_t token)> on_token) {
  EK_RETURN_IF_ERROR(Validate(options));
  if (prompt.empty())
    return absl::InvalidArgumentError("the prompt is empty; at least one token is required");
  const size_t context = model.options().context;
  const std::vector<int64_t> ends = TextTokensOf(model.options()).ends;
  StableRandom random(options.seed);
  std::vector<int32_t>& tokens = prompt;
  for (int64_t i = 0; i < options.count; ++i) {
    const auto recent = std::span(tokens).last(std::min(context, tokens.size()));
    EK_ASSIGN_OR_RETURN(const std::span<const float> scores, model.NextToken(recent));
    EK_ASSIGN_OR_RETURN(const int32_t next, SampleToken(scores, options.sample, random.Uniform()));
    if (std::ranges::count(ends, next) > 0) break;
    EK_RETURN_IF_ERROR(on_token(next));
    tokens.push_back(next);
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
