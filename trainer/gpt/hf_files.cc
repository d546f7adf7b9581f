#include "evenkeel/trainer/gpt/hf_files.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr int kMaxDepth = 16;

std::string TextOf(const OrderedJson& json) { return json.dump(2) + "\n"; }

// Settings that change what a GPT-2 computes, with the values that gpt.h has.
const Json& Expected() {
  static const Json& kExpected =
      *new Json{{"activation_function", {"gelu_new", "gelu_pytorch_tanh"}},
                {"layer_norm_epsilon", {1e-5}},
                {"scale_attn_weights", {true}},
                {"scale_attn_by_inverse_layer_idx", {false}},
                {"add_cross_attention", {false}},
                {"tie_word_embeddings", {true}},
                {"model_type", {"gpt2"}}};  // Never destroyed.
  return kExpected;
}

absl::Status Refuse(absl::string_view field, const Json& value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value.dump(), "; ", wanted));
}

// Returns a size by either of its names; two that differ are an error.
absl::StatusOr<int64_t> SizeIn(const Json& config, const char* name, const char* alias,
                               int64_t usual) {
  const Json size = config.value(name, config.value(alias, Json(usual)));
  if (!size.is_number_integer() || size <= 0 || size > std::numeric_limits<int32_t>::max())
    return Refuse(name, size, "expected a positive number");
  if (const Json other = config.value(alias, size); other != size)
    return Refuse(name, size, absl::StrCat("but ", alias, " is ", other.dump()));
  return size.get<int64_t>();
}

// A token or a list of them. A file without the field has the tokens of `usual`.
absl::StatusOr<std::vector<int64_t>> TokensIn(const Json& json, const char* name,
                                              const Json& usual) {
  const Json value = json.value(name, usual);
  std::vector<int64_t> tokens;
  for (const Json& token : value.is_array() ? value : Json::array({value})) {
    if (token.is_null()) continue;
    if (!token.is_number_integer()) return Refuse(name, value, "expected the number of a token");
    tokens.push_back(token.get<int64_t>());
  }
  return tokens;
}

absl::StatusOr<TextTokens> TextTokensIn(const Json& json, const Json& usual) {
  TextTokens tokens;
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> begin, TokensIn(json, "bos_token_id", usual));
  EK_ASSIGN_OR_RETURN(tokens.ends, TokensIn(json, "eos_token_id", usual));
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> pad, TokensIn(json, "pad_token_id", nullptr));
  if (begin.size() > 1 || pad.size() > 1)
    return absl::InvalidArgumentError("bos_token_id or pad_token_id is more than one token");
  if (!begin.empty()) tokens.begin = begin[0];
  if (!pad.empty()) tokens.pad = pad[0];
  return tokens;
}

absl::StatusOr<HfConfig> ConfigIn(const Json& json) {
  for (const auto& [name, accepted] : Expected().items()) {
    const auto found = json.find(name);
    if (found == json.end() || std::ranges::count(accepted, *found) > 0) continue;
    return Refuse(name, *found, absl::StrCat("only ", accepted[0].dump(), " is supported"));
  }
  // Missing fields have the defaults of the class GPT2Config.
  HfConfig config;
  EK_ASSIGN_OR_RETURN(config.vocabulary, SizeIn(json, "vocab_size", "vocab_size", 50257));
  EK_ASSIGN_OR_RETURN(config.context, SizeIn(json, "n_positions", "max_position_embeddings", 1024));
  EK_ASSIGN_OR_RETURN(config.width, SizeIn(json, "n_embd", "hidden_size", 768));
  EK_ASSIGN_OR_RETURN(config.layers, SizeIn(json, "n_layer", "num_hidden_layers", 12));
  EK_ASSIGN_OR_RETURN(config.heads, SizeIn(json, "n_head", "num_attention_heads", 12));
  const Json inner = json.value("n_inner", Json());
  if (!inner.is_null() && inner != 4 * config.width)
    return Refuse("n_inner", inner,
                  absl::StrCat("only ", 4 * config.width, ", four times n_embd, is supported"));
  EK_ASSIGN_OR_RETURN(config.text_tokens, TextTokensIn(json, 50256));
  return config;
}

Json JsonOf(const std::optional<int64_t>& token) {
  return token.has_value() ? Json(*token) : Json();
}

}  // namespace

std::map<std::string, std::string> HfFiles(const GptOptions& options) {
  const Tokenizer* const tokenizer = options.tokenizer.get();
  const TextTokens tokens = TextTokensOf(options);
  OrderedJson ids = {{"bos_token_id", JsonOf(tokens.begin)},
                     {"eos_token_id", tokens.ends},
                     {"pad_token_id", JsonOf(tokens.pad)}};
  if (tokens.ends.size() < 2)
    ids["eos_token_id"] = tokens.ends.empty() ? Json() : Json(tokens.ends[0]);
  OrderedJson config = {{"architectures", {"GPT2LMHeadModel"}},
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
                        {"torch_dtype", "float32"}};
  config.update(ids);
  std::map<std::string, std::string> files = {{"config.json", TextOf(config)},
                                              {"generation_config.json", TextOf(ids)}};
  if (tokenizer == nullptr) return files;
  OrderedJson tokenizer_config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                  {"model_max_length", options.context},
                                  {"add_prefix_space", tokenizer->parts().adds_space},
                                  {"clean_up_tokenization_spaces", false}};
  for (const auto& [name, token] : tokenizer->parts().named)
    tokenizer_config[name] = tokenizer->piece(token);
  files["tokenizer.json"] = TokenizerJson(*tokenizer);
  files["tokenizer_config.json"] = TextOf(tokenizer_config);
  return files;
}

absl::StatusOr<std::optional<HfConfig>> ReadHfConfig(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/config.json");
  const absl::StatusOr<Json> json = internal::ReadStrictJson(path, kMaxDepth);
  if (absl::IsNotFound(json.status())) return std::nullopt;
  EK_RETURN_IF_ERROR(json.status());
  EK_ASSIGN_OR_RETURN(HfConfig config, Annotate(ConfigIn(*json), path));
  const std::string generation = absl::StrCat(folder, "/generation_config.json");
  const absl::StatusOr<Json> how = internal::ReadStrictJson(generation, kMaxDepth);
  if (absl::IsNotFound(how.status())) return config;
  EK_RETURN_IF_ERROR(how.status());
  EK_ASSIGN_OR_RETURN(config.text_tokens, Annotate(TextTokensIn(*how, nullptr), generation));
  return config;
}

TextTokens TextTokensOf(const GptOptions& options) {
  if (options.text_tokens.has_value() || options.tokenizer == nullptr)
    return options.text_tokens.value_or(TextTokens());
  const Tokenizer& tokenizer = *options.tokenizer;
  TextTokens tokens{.begin = tokenizer.Named("bos_token"), .pad = tokenizer.Named("pad_token")};
  if (const auto end = tokenizer.Named("eos_token"); end.has_value()) tokens.ends = {*end};
  return tokens;
}

}  // namespace evenkeel
