#include "evenkeel/trainer/gpt/hf_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

std::string TextOf(const OrderedJson& json) { return json.dump(2) + "\n"; }

// Settings that change what a GPT-2 computes, with the values that gpt.h has.
const Json& Expected() {
  static const Json& kExpected =
      *new Json{{"activation_function", {"gelu_new", "gelu_pytorch_tanh"}},
                {"layer_norm_epsilon", {1e-5}},
                {"scale_attn_weights", {true}},
                {"scale_attn_by_inverse_layer_idx", {false}},
                {"add_cross_attention", {false}},
                {"tie_word_embeddings", {true}}};  // Never destroyed.
  return kExpected;
}

absl::StatusOr<std::optional<int64_t>> HeadsOf(const Json& config) {
  if (!config.is_object()) return absl::InvalidArgumentError("is not a JSON object");
  const auto type = config.find("model_type");
  if (type != config.end() && *type != "gpt2")
    return std::nullopt;  // config.json describes another model.
  for (const auto& [name, accepted] : Expected().items()) {
    const auto found = config.find(name);
    if (found == config.end() || std::ranges::count(accepted, *found) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", found->dump(), "; only ", accepted[0].dump(), " is supported"));
  }
  const auto heads = config.find("n_head");
  if (heads == config.end()) return std::nullopt;
  if (heads->is_number_integer() && *heads > 0) return heads->get<int64_t>();
  return absl::InvalidArgumentError(absl::StrCat("n_head is ", heads->dump()));
}

}  // namespace

std::map<std::string, std::string> HfFiles(const GptOptions& options) {
  const Tokenizer* const tokenizer = options.tokenizer.get();
  OrderedJson end = nullptr;  // The token that ends a text.
  if (tokenizer != nullptr && tokenizer->Find(kEndOfText).has_value())
    end = *tokenizer->Find(kEndOfText);
  const OrderedJson config = {{"architectures", {"GPT2LMHeadModel"}},
                              {"model_type", "gpt2"},
                              {"vocab_size", options.vocabulary},
                              {"n_positions", options.context},
                              {"n_embd", options.width},
                              {"n_layer", options.layers},
                              {"n_head", options.heads},
                              {"activation_function", "gelu_new"},
                              {"layer_norm_epsilon", 1e-5},
                              {"embd_pdrop", options.dropout},
                              {"attn_pdrop", options.dropout},
                              {"resid_pdrop", options.dropout},
                              {"tie_word_embeddings", true},
                              {"bos_token_id", end},
                              {"eos_token_id", end},
                              {"torch_dtype", "float32"}};
  std::map<std::string, std::string> files = {
      {"config.json", TextOf(config)},
      {"generation_config.json", TextOf({{"bos_token_id", end}, {"eos_token_id", end}})}};
  if (tokenizer == nullptr) return files;
  OrderedJson tokenizer_config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                  {"model_max_length", options.context},
                                  {"clean_up_tokenization_spaces", false}};
  if (!end.is_null()) {
    tokenizer_config["bos_token"] = kEndOfText;
    tokenizer_config["eos_token"] = kEndOfText;
  }
  files["tokenizer.json"] = TokenizerJson(*tokenizer);
  files["tokenizer_config.json"] = TextOf(tokenizer_config);
  return files;
}

absl::StatusOr<std::optional<int64_t>> HeadsInConfig(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/config.json");
  const absl::StatusOr<std::string> text = ReadFile(path, {.max_bytes = 1 << 20});
  if (absl::IsNotFound(text.status())) return std::nullopt;
  EK_RETURN_IF_ERROR(text.status());
  return Annotate(HeadsOf(Json::parse(*text, nullptr, /*allow_exceptions=*/false)), path);
}

}  // namespace evenkeel
