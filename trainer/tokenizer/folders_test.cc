// Compares with what Hugging Face's software made of the same files (tests/testdata/tokenizer).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/tokenizer/split_words.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

namespace evenkeel {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json Recorded() {
  std::ifstream file("tests/testdata/tokenizer/folders.json");
  return json::parse(file);
}

void Write(const std::string& path, absl::string_view text) { std::ofstream(path) << text; }

std::string MergesOf(const json& model) {
  std::string merges = "#version: 0.2\n";
  for (const json& merge : model["merges"]) {
    absl::StrAppend(&merges, merge[0].get<std::string>(), " ", merge[1].get<std::string>(), "\n");
  }
  return merges;
}

// Writes a recorded case into a folder of its own, which is returned.
std::string FolderOf(const json& base, const json& recorded) {
  const std::string folder = testing::TempDir() + "/folder";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  if (recorded.value("is_vocabulary", false)) {
    Write(folder + "/vocab.json", base["model"]["vocab"].dump());
    Write(folder + "/merges.txt", MergesOf(base["model"]));
  } else {
    json tokenizer = base;
    tokenizer.merge_patch(recorded["patch"]);
    Write(folder + "/tokenizer.json", tokenizer.dump());
  }
  const json files = recorded.value("files", json::object());
  for (const auto& [name, content] : files.items()) Write(folder + "/" + name, content.dump());
  return folder;
}

// The cases that are refused, with the file and the reason; the tokens of all others are recorded.
const std::map<std::string, std::string>& Refused() {
  static const auto& kRefused = *new std::map<std::string, std::string>{
      {"two contents with one number",
       "tokenizer.json: added token \"<b>\" has the number 264, but Hugging Face's software would "
       "give it 265"},
      {"numbers with a gap",
       "tokenizer.json: added token \"<a>\" has the number 271, but Hugging Face's software would "
       "give it 264"},
      {"two pieces with one number", "tokenizer.json: two tokens, one of them \""},
      {"a template with a token", "tokenizer.json: post_processor is TemplateProcessing; only"},
      {"a token only beside",
       "tokenizer_config.json: the token \"<tool>\" is missing from the tokenizer.json"},
      {"a space only beside",
       "tokenizer_config.json: add_prefix_space is true, but false in tokenizer.json"},
      {"an end that is no added token",
       "tokenizer_config.json: the token \"the\" is missing from the tokenizer.json"},
      {"added_tokens.json with a gap",
       "added_tokens.json: added token \"<tool>\" has the number 267, but Hugging Face's software "
       "would give it 264"},
      {"a token with lstrip",
       "tokenizer_config.json: added token \"<tool>\" sets lstrip, which is not supported"},
      {"a beginning before each text",
       "tokenizer_config.json: add_bos_token is true; only false is supported"},
  };  // Never destroyed.
  return kRefused;
}

TEST(FoldersTest, HaveHuggingFacesTokensOrAreRefused) {
  const json recorded = Recorded();
  ASSERT_EQ(recorded["cases"].size(), 24u);
  size_t refused = 0;
  for (const auto& [name, one] : recorded["cases"].items()) {
    SCOPED_TRACE(name);
    const absl::StatusOr<Tokenizer> tokenizer = ReadTokenizer(FolderOf(recorded["base"], one));
    if (const auto why = Refused().find(name); why != Refused().end()) {
      ++refused;
      EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(why->second));
      continue;
    }
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    if (!tokenizer.ok()) continue;
    ASSERT_EQ(one["tokens"].size(), 2u);
    for (const auto& [software, tokens] : one["tokens"].items()) {
      for (size_t i = 0; i < tokens.size(); ++i) {
        EXPECT_EQ(tokenizer->Encode(recorded["strings"][i].get<std::string>()), tokens[i])
            << software << ": " << recorded["strings"][i];
      }
    }
  }
  EXPECT_EQ(refused, Refused().size());
}

std::string Utf8(uint32_t c) {
  const auto byte = [](uint32_t bits) { return static_cast<char>(bits); };
  const auto rest = [&](int shift) { return byte(0x80 | ((c >> shift) & 0x3f)); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xc0 | c >> 6), rest(0)};
  if (c < 0x10000) return {byte(0xe0 | c >> 12), rest(6), rest(0)};
  return {byte(0xf0 | c >> 18), rest(12), rest(6), rest(0)};
}

TEST(SplitWordsTest, EachCharacterHasTheClassOfHuggingFaces) {
  const auto is_one_word = [](const std::string& text) {
    int words = 0;
    SplitWords(text, [&](absl::string_view) { ++words; });
    return words == 1;
  };
  std::string classes;
  std::map<char, int> counts;
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    const std::string character = Utf8(c);
    const char kind = is_one_word("a" + character)   ? 'L'
                      : is_one_word("1" + character) ? 'N'
                      : is_one_word("!" + character) ? 'O'
                                                     : 'S';
    classes.push_back(kind);
    ++counts[kind];
  }
  const json recorded = Recorded()["classes"];
  for (const auto& [kind, count] : counts) EXPECT_EQ(count, recorded[std::string(1, kind)]) << kind;
  EXPECT_EQ(crc32(0, reinterpret_cast<const Bytef*>(classes.data()), classes.size()),
            recorded["crc32"]);
}

// As one regular expression they took half a minute; 0.5 seconds in Hugging Face's tokenizers.
TEST(TokenizerTest, ManyAddedTokensAreFoundInATimeThatTheirNumberDoesNotMatterFor) {
  json tokenizer = Recorded()["base"];
  const int first = static_cast<int>(tokenizer["model"]["vocab"].size());
  const auto content = [](uint64_t i) {
    return absl::StrCat(absl::Hex((i + 1) * 0x9e3779b97f4a7c15));
  };
  for (int i = 0; i < 20'000; ++i) {
    tokenizer["added_tokens"].push_back(
        {{"id", first + i}, {"content", content(i)}, {"special", false}, {"normalized", true}});
  }
  const std::string folder = FolderOf(tokenizer, {{"patch", json::object()}});
  const absl::StatusOr<Tokenizer> read = ReadTokenizer(folder);
  ASSERT_TRUE(read.ok()) << read.status();
  std::string text;
  for (int i = 0; text.size() < 1'000'000; ++i)
    absl::StrAppend(&text, "the ", content(i % 40'000), " ");
  const std::clock_t begin = std::clock();  // Of the processor: others load the machine.
  const std::vector<int32_t> tokens = read->Encode(text);
  EXPECT_LT(std::clock() - begin, CLOCKS_PER_SEC);
  std::string again;
  for (const int32_t token : tokens) absl::StrAppend(&again, read->piece(token));
  EXPECT_EQ(again, text);
  EXPECT_EQ(read->Encode(content(19'999) + content(7)),
            (std::vector<int32_t>{first + 19'999, first + 7}));
}

}  // namespace
}  // namespace evenkeel
