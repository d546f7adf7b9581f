// The sizes of a GPT and the precision of its computation (gpt.h).
//
//   EK_ASSIGN_OR_RETURN(GptOptions options, GptPreset("mini"));
//   options.layers = 6;
//
// Threads: values.
// Errors:  InvalidArgument with the unknown preset and the list of presets.

#ifndef EVENKEEL_TRAINER_GPT_GPT_OPTIONS_H_
#define EVENKEEL_TRAINER_GPT_GPT_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {

enum class GptCompute { kFloat32, kBFloat16, kFloat64 };

// Tokens with a meaning for a model; none need be in its vocabulary.
struct TextTokens {
  std::optional<int64_t> begin;  // Precedes a text.
  std::vector<int64_t> ends;     // Each ends a text.
  std::optional<int64_t> pad;
};

struct GptOptions {
  int64_t vocabulary = 256;
  int64_t context = 128;
  int64_t layers = 4;
  int64_t width = 128;
  int64_t heads = 4;   // Divides `width`.
  double dropout = 0;  // After the embeddings, of attention weights, and at the end of each part.
  GptCompute compute = GptCompute::kFloat32;
  uint64_t seed = 0;
  bool is_plan = false;                        // See model.h.
  std::shared_ptr<const Tokenizer> tokenizer;  // Null: unknown. It is saved with the model.
  std::optional<TextTokens> text_tokens;       // Nullopt: those of the tokenizer.
};

// "tiny" (2 layers, width 64, 2 heads, context 64), "mini" (4 layers, width 128, 4 heads, context
// 128), both of bytes; "gpt2" (12 layers, width 768, 12 heads, context 1024, vocabulary 50257).
absl::StatusOr<GptOptions> GptPreset(absl::string_view name);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_OPTIONS_H_
