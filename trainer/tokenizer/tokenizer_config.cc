#include "evenkeel/trainer/tokenizer/tokenizer_config.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;

absl::Status Refuse(absl::string_view field, const Json& value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat(
      field, " is ", value.dump(-1, ' ', false, Json::error_handler_t::replace), "; ", wanted));
}

// A token is its content, or an object with that and flags.
absl::StatusOr<std::string> AddSpecial(absl::string_view field, const Json& token,
                                       TokenizerConfig& config) {
  Json entry = {{"special", true}, {"normalized", false}, {"content", token}};
  if (token.is_object()) entry.update(token);
  const Json& content = entry["content"];
  if (!content.is_string() || content == "") return Refuse(field, token, "expected a token");
  config.specials[content.get<std::string>()] = entry;
  return content.get<std::string>();
}

absl::Status ReadNames(const Json& json, TokenizerConfig& config) {
  for (const auto& [field, value] : json.items()) {
    const bool is_token = absl::EndsWith(field, "_token");
    if (field == "additional_special_tokens" || field == "extra_special_tokens") {
      for (const Json& token : value) EK_RETURN_IF_ERROR(AddSpecial(field, token, config).status());
    } else if (value == true && (is_token || field == "split_special_tokens")) {
      return Refuse(field, value, "only false is supported");  // add_bos_token
    } else if (is_token && !value.is_boolean() && !value.is_null()) {
      EK_ASSIGN_OR_RETURN(config.named[field], AddSpecial(field, value, config));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadConfig(Json json, TokenizerConfig& config) {
  const Json kind = json.value("tokenizer_class", Json("GPT2Tokenizer"));
  if (kind.is_string() && absl::StrContains(kind.get<std::string>(), "GPT2")) {
    for (const char* const name : {"bos_token", "eos_token", "unk_token"})
      json.emplace(name, kEndOfText);  // Unless it is there, null too.
  }
  EK_RETURN_IF_ERROR(ReadNames(json, config));
  const Json space = json.value("add_prefix_space", Json());
  if (space.is_boolean()) config.adds_space = space.get<bool>();
  if (!space.is_boolean() && !space.is_null())
    return Refuse("add_prefix_space", space, "expected true or false");
  const Json added = json.value("added_tokens_decoder", Json::object());
  for (const auto& [number, token] : added.items()) {
    int64_t id;
    if (!absl::SimpleAtoi(number, &id) || !token.is_object())
      return Refuse(absl::StrCat("added_tokens_decoder.", number), token, "expected a token");
    config.added[id] = token;
  }
  return absl::OkStatus();
}

// The form before tokenizer_config.json had added_tokens_decoder.
absl::Status ReadAddedTokens(const Json& json, TokenizerConfig& config) {
  for (const auto& [content, number] : json.items()) {
    const bool is_special = config.specials.contains(content);
    if (!number.is_number_integer() ||
        !config.added
             .insert({number.get<int64_t>(),
                      {{"content", content}, {"special", is_special}, {"normalized", !is_special}}})
             .second) {
      return Refuse(content, number, "expected a number that no other token has");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerConfig> ReadTokenizerConfig(const std::string& folder) {
  TokenizerConfig config;
  const auto use = [&](const std::string& name, auto read) -> absl::Status {
    const std::string path = folder.empty() ? name : absl::StrCat(folder, "/", name);
    const absl::StatusOr<Json> json = internal::ReadStrictJson(path, kMaxDepth);
    // Without its file the class GPT2Tokenizer has its defaults.
    if (absl::IsNotFound(json.status())) return read(Json::object(), config);
    EK_RETURN_IF_ERROR(json.status());
    config.path = path;
    return Annotate(read(*json, config), path);
  };
  EK_RETURN_IF_ERROR(use("tokenizer_config.json", ReadConfig));
  if (!config.added.empty()) return config;
  EK_RETURN_IF_ERROR(use("special_tokens_map.json", ReadNames));
  EK_RETURN_IF_ERROR(use("added_tokens.json", ReadAddedTokens));
  return config;
}

}  // namespace evenkeel
