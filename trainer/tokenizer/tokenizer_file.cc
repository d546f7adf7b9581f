#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/trainer/tokenizer/gpt2_bytes.h"
#include "evenkeel/trainer/tokenizer/tokenizer_config.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kMaxBytes = int64_t{1} << 28;
constexpr int kMaxDepth = 16;
constexpr int64_t kMostUnused = 1 << 16;  // Numbers without a token.
constexpr int64_t kMaxTokens = int64_t{1} << 24;

absl::Status Bad(const absl::string_view what) { return absl::InvalidArgumentError(what); }

bool IsThere(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

// ---- The alphabet ----

// The UTF-8 of a character below U+0800.
std::string Utf8(uint32_t character) {
  if (character < 0x80) return std::string(1, static_cast<char>(character));
  return {static_cast<char>(0xc0 | (character >> 6)), static_cast<char>(0x80 | (character & 0x3f))};
}

// Returns the bytes for which the characters of `piece` stand.
absl::StatusOr<std::string> BytesOf(absl::string_view piece) {
  static const auto& kBytes = *[] {
    auto* const bytes = new absl::flat_hash_map<std::string, char>;  // Never destroyed.
    for (int byte = 0; byte < 256; ++byte)
      (*bytes)[Utf8(Gpt2Character(static_cast<uint8_t>(byte)))] = static_cast<char>(byte);
    return bytes;
  }();
  std::string bytes;
  for (absl::string_view rest = piece; !rest.empty();) {
    const size_t size = (rest[0] & 0x80) == 0 ? 1 : 2;
    const auto found = kBytes.find(rest.substr(0, size));
    if (found == kBytes.end())
      return Bad(absl::StrCat("\"", piece, "\" is not made of characters that stand for bytes"));
    bytes.push_back(found->second);
    rest.remove_prefix(size);
  }
  return bytes;
}

std::string CharactersOf(absl::string_view bytes) {
  std::string characters;
  for (const char byte : bytes) characters += Utf8(Gpt2Character(static_cast<uint8_t>(byte)));
  return characters;
}

// ---- Reading ----

// Returns the member, or null.
const Json& MemberOf(const Json& object, const char* name) {
  static const Json& kNull = *new Json;  // Never destroyed.
  if (!object.is_object()) return kNull;
  const auto found = object.find(name);
  return found == object.end() ? kNull : *found;
}

std::string TextOf(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Collects a tokenizer's parts from a file, where characters stand for bytes.
class PartsReader {
 public:
  absl::Status AddVocabulary(const Json& vocabulary) {
    if (!vocabulary.is_object()) return Bad("the vocabulary is not an object");
    for (const auto& [piece, number] : vocabulary.items()) EK_RETURN_IF_ERROR(Add(piece, number));
    next_ = std::ssize(tokens_);
    return absl::OkStatus();
  }

  // `entry` is as in tokenizer.json's added_tokens.
  absl::Status AddAdded(const Json& entry, const Json& number) {
    const Json& text = MemberOf(entry, "content");
    if (!text.is_string() || text == "")
      return Bad(absl::StrCat("added token ", TextOf(entry), " has no content"));
    const std::string content = text.get<std::string>();
    for (const char* const name : {"lstrip", "rstrip", "single_word"}) {
      if (MemberOf(entry, name) == true)
        return Bad(
            absl::StrCat("added token \"", content, "\" sets ", name, ", which is not supported"));
    }
    // A token that is not in the vocabulary has the next number, whatever its entry says.
    const auto in_vocabulary = tokens_.find(content);
    const int64_t expected = in_vocabulary != tokens_.end() ? in_vocabulary->second : next_;
    if (number != expected) {
      return Bad(absl::StrCat("added token \"", content, "\" has the number ", number.dump(),
                              ", but Hugging Face's software would give it ", expected));
    }
    const AddedToken token = {.token = static_cast<int32_t>(expected),
                              .is_special = MemberOf(entry, "special") == true,
                              .is_normalized = MemberOf(entry, "normalized") == true};
    if (const auto known = added_.find(content); known != added_.end()) {
      if (known->second == token) return absl::OkStatus();
      return Bad(absl::StrCat("added token \"", content, "\" appears twice, with different flags"));
    }
    if (is_complete_) return NotInFile(content);
    EK_RETURN_IF_ERROR(Add(content, number));
    next_ = std::max(next_, expected + 1);
    added_.insert({content, token});
    parts_.added.push_back(token);
    return absl::OkStatus();
  }

  // Applies the files beside the tokenizer. `is_complete`: they may add nothing.
  absl::Status Apply(const TokenizerConfig& config, bool is_complete) {
    is_complete_ = is_complete;
    if (is_complete && config.adds_space.value_or(parts_.adds_space) != parts_.adds_space) {
      return Bad(parts_.adds_space ? "add_prefix_space is false, but true in tokenizer.json"
                                   : "add_prefix_space is true, but false in tokenizer.json");
    }
    parts_.adds_space = config.adds_space.value_or(parts_.adds_space);
    for (const auto& [number, entry] : config.added) EK_RETURN_IF_ERROR(AddAdded(entry, number));
    for (const auto& [content, entry] : config.specials) {
      if (added_.contains(content)) continue;
      const auto token = tokens_.find(content);
      if (token != tokens_.end() && !is_complete) {
        EK_RETURN_IF_ERROR(AddAdded(entry, token->second));
      } else if (!config.path.empty()) {
        return NotInFile(content);
      }
    }
    for (const auto& [name, content] : config.named) {
      if (added_.contains(content)) parts_.named[name] = tokens_.at(content);
    }
    return absl::OkStatus();
  }

  // "left right".
  absl::Status AddMerge(absl::string_view left, absl::string_view right) {
    const auto left_token = tokens_.find(left), right_token = tokens_.find(right);
    if (left_token == tokens_.end() || right_token == tokens_.end()) {
      return Bad(absl::StrCat("merge ", parts_.merges.size(), ", \"", left, " ", right,
                              "\", uses pieces that are not in the vocabulary"));
    }
    parts_.merges.push_back({left_token->second, right_token->second});
    return absl::OkStatus();
  }
  absl::Status AddMerge(absl::string_view line) {
    const std::vector<absl::string_view> pair = absl::StrSplit(line, ' ');
    if (pair.size() != 2)
      return Bad(absl::StrCat("merge ", parts_.merges.size(), ", \"", line, "\", is not a pair"));
    return AddMerge(pair[0], pair[1]);
  }

  void set_adds_space(bool adds_space) { parts_.adds_space = adds_space; }

  absl::StatusOr<Tokenizer> Make() && {
    for (const auto& [piece, token] : tokens_) {
      if (token > std::ssize(tokens_) + kMostUnused) {
        return Bad(absl::StrCat("token \"", piece, "\" has the number ", token, ", but there are ",
                                tokens_.size(), " tokens"));
      }
      if (parts_.pieces.size() <= static_cast<size_t>(token)) parts_.pieces.resize(token + 1);
      if (!parts_.pieces[token].empty())
        return Bad(
            absl::StrCat("two tokens, one of them \"", piece, "\", have the number ", token));
      if (added_.contains(piece)) {
        parts_.pieces[token] = piece;  // Added tokens stand for themselves.
      } else {
        EK_ASSIGN_OR_RETURN(parts_.pieces[token], BytesOf(piece));
      }
    }
    return Tokenizer::Make(std::move(parts_));
  }

 private:
  absl::Status Add(const std::string& piece, const Json& number) {
    if (!number.is_number_integer() || number < 0 || number >= kMaxTokens)
      return Bad(absl::StrCat("token \"", piece, "\" has the number ", number.dump()));
    const auto [found, is_new] = tokens_.insert({piece, number.get<int32_t>()});
    if (is_new || found->second == number) return absl::OkStatus();
    return Bad(absl::StrCat("token \"", piece, "\" has the numbers ", found->second, " and ",
                            number.dump()));
  }

  static absl::Status NotInFile(absl::string_view content) {
    return Bad(
        absl::StrCat("the token \"", content,
                     "\" is missing from the tokenizer.json, or vocab.json, of the same folder"));
  }

  TokenizerParts parts_;
  absl::flat_hash_map<std::string, int32_t> tokens_;
  absl::flat_hash_map<std::string, AddedToken> added_;  // Of these.
  int64_t next_ = 0;  // The number of the next token that is not in the vocabulary.
  bool is_complete_ = false;
};

// Returns an error if a setting differs from GPT-2's.
absl::Status CheckKind(const Json& json) {
  const auto refuse = [](absl::string_view what, const Json& value) {
    return Bad(absl::StrCat(what, " is ", TextOf(value),
                            "; only byte-level BPE tokenizers like GPT-2's are supported"));
  };
  const auto is_byte_level = [&](const char* part) {
    const Json& value = MemberOf(json, part);
    return value.is_null() || MemberOf(value, "type") == "ByteLevel";
  };
  // A template that has nothing but the text.
  const auto adds_nothing = [&](const Json& value) {
    const Json& single = MemberOf(value, "single");
    return MemberOf(value, "type") == "TemplateProcessing" && single.is_array() &&
           single.size() == 1 && !MemberOf(single[0], "Sequence").is_null();
  };
  const Json& model = MemberOf(json, "model");
  // GPT-2's own file predates the field `type`.
  const Json& type = MemberOf(model, "type");
  if (type != "BPE" && !type.is_null()) return refuse("model.type", type);
  const Json& splits = MemberOf(json, "pre_tokenizer");
  if (splits.is_null() || !is_byte_level("pre_tokenizer"))
    return refuse("pre_tokenizer", MemberOf(splits, "type"));
  if (MemberOf(splits, "use_regex") == false) return refuse("use_regex", false);
  const Json& normalizer = MemberOf(json, "normalizer");
  if (!normalizer.is_null() && MemberOf(normalizer, "normalizers") != Json::array())
    return refuse("normalizer", MemberOf(normalizer, "type"));
  const Json& post_processor = MemberOf(json, "post_processor");
  if (!is_byte_level("post_processor") && !adds_nothing(post_processor))
    return refuse("post_processor", MemberOf(post_processor, "type"));
  if (!is_byte_level("decoder"))
    return refuse("decoder", MemberOf(MemberOf(json, "decoder"), "type"));
  for (const char* const name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                 "byte_fallback", "ignore_merges"}) {
    const Json& value = MemberOf(model, name);
    if (!value.is_null() && value != "" && value != false && value != 0)
      return refuse(absl::StrCat("model.", name), value);
  }
  return absl::OkStatus();
}

absl::StatusOr<PartsReader> ParseTokenizer(const Json& json) {
  EK_RETURN_IF_ERROR(CheckKind(json));
  const Json& model = MemberOf(json, "model");
  PartsReader reader;
  EK_RETURN_IF_ERROR(reader.AddVocabulary(MemberOf(model, "vocab")));
  const Json& added = MemberOf(json, "added_tokens");
  for (const Json& token : added.is_array() ? added : Json::array()) {
    EK_RETURN_IF_ERROR(reader.AddAdded(token, MemberOf(token, "id")));
  }
  const Json& merges = MemberOf(model, "merges");
  if (!merges.is_array()) return Bad("model has no list of merges");
  for (const Json& merge : merges) {
    const bool is_pair = merge.is_array() && merge.size() == 2;
    EK_RETURN_IF_ERROR(is_pair ? reader.AddMerge(TextOf(merge[0]), TextOf(merge[1]))
                               : reader.AddMerge(TextOf(merge)));
  }
  reader.set_adds_space(MemberOf(MemberOf(json, "pre_tokenizer"), "add_prefix_space") == true);
  return reader;
}

// merges.txt begins with a line "#version: ...", and has a merge in each of the others.
absl::StatusOr<PartsReader> ParseTokenizer(const Json& vocabulary, absl::string_view merges) {
  PartsReader reader;
  EK_RETURN_IF_ERROR(reader.AddVocabulary(vocabulary));
  for (const absl::string_view line : absl::StrSplit(merges, '\n', absl::SkipEmpty())) {
    if (!absl::StartsWith(line, "#version"))
      EK_RETURN_IF_ERROR(reader.AddMerge(absl::StripSuffix(line, "\r")));
  }
  return reader;
}

// Returns tokenizer.json or vocab.json for a folder, the path itself for a file; "" if the folder
// has neither.
std::string FileOf(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return path;
  if (IsThere(path + "/tokenizer.json")) return path + "/tokenizer.json";
  const bool has_both = IsThere(path + "/vocab.json") && IsThere(path + "/merges.txt");
  return has_both ? path + "/vocab.json" : "";
}

absl::StatusOr<Tokenizer> ReadFrom(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const Json json, internal::ReadStrictJson(path, kMaxDepth));
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  // In a vocabulary "model" may be a token.
  const bool is_complete = MemberOf(json, "model").is_object();
  std::string merges;
  if (!is_complete) {
    EK_ASSIGN_OR_RETURN(merges, ReadFile(folder / "merges.txt", {.max_bytes = kMaxBytes}));
  }
  EK_ASSIGN_OR_RETURN(
      PartsReader reader,
      Annotate(is_complete ? ParseTokenizer(json) : ParseTokenizer(json, merges), path));
  EK_ASSIGN_OR_RETURN(const TokenizerConfig config, ReadTokenizerConfig(folder));
  EK_RETURN_IF_ERROR(Annotate(reader.Apply(config, is_complete), config.path));
  return Annotate(std::move(reader).Make(), path);
}

}  // namespace

std::string TokenizerBeside(const std::string& file) {
  const std::string parent = std::filesystem::path(file).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  std::error_code error;
  const bool has_one = std::filesystem::is_directory(folder, error) && !FileOf(folder).empty();
  return has_one ? folder : "";
}

absl::StatusOr<Tokenizer> ReadTokenizer(const std::string& path) {
  const std::string file = FileOf(path);
  if (!file.empty()) return ReadFrom(file);
  return absl::NotFoundError(
      absl::StrCat(path, " has no tokenizer.json, nor vocab.json with merges.txt"));
}

std::string TokenizerJson(const Tokenizer& tokenizer) {
  const TokenizerParts& parts = tokenizer.parts();
  std::vector<std::string> names;
  for (const std::string& piece : parts.pieces) names.push_back(CharactersOf(piece));
  for (const AddedToken& added : parts.added) names[added.token] = parts.pieces[added.token];
  const OrderedJson bytes = {{"type", "ByteLevel"},
                             {"add_prefix_space", parts.adds_space},
                             {"trim_offsets", true},
                             {"use_regex", true}};
  OrderedJson added = OrderedJson::array();
  for (const AddedToken& one : parts.added) {
    added.push_back({{"id", one.token},
                     {"content", parts.pieces[one.token]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", one.is_normalized},
                     {"special", one.is_special}});
  }
  OrderedJson vocabulary = OrderedJson::object();
  auto& pieces = vocabulary.get_ref<OrderedJson::object_t&>();
  for (int32_t token = 0; token < tokenizer.size(); ++token) {
    // operator[] would search all earlier members.
    if (!parts.pieces[token].empty()) pieces.push_back({names[token], token});
  }
  OrderedJson merges = OrderedJson::array();
  for (const auto& [left, right] : parts.merges)
    merges.push_back(absl::StrCat(names[left], " ", names[right]));
  const OrderedJson json = {{"version", "1.0"},
                            {"truncation", nullptr},
                            {"padding", nullptr},
                            {"added_tokens", added},
                            {"normalizer", nullptr},
                            {"pre_tokenizer", bytes},
                            {"post_processor", bytes},
                            {"decoder", bytes},
                            {"model",
                             {{"type", "BPE"},
                              {"dropout", nullptr},
                              {"unk_token", nullptr},
                              {"continuing_subword_prefix", ""},
                              {"end_of_word_suffix", ""},
                              {"fuse_unk", false},
                              {"byte_fallback", false},
                              {"ignore_merges", false},
                              {"vocab", vocabulary},
                              {"merges", merges}}}};
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
}

}  // namespace evenkeel
