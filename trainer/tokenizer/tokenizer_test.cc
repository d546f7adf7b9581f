#include "evenkeel/trainer/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/tokenizer/learn_tokenizer.h"
#include "evenkeel/trainer/tokenizer/split_words.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

namespace evenkeel {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr char kFolder[] = "tests/testdata/tokenizer/";
constexpr char kHf[] = "tests/testdata/tokenizer/hf_tokenizer.json";

struct Recorded {
  std::vector<std::string> strings;
  std::vector<std::vector<int32_t>> tokens;
};

// The recorded results of Hugging Face's tokenizers.
Recorded OddStrings() {
  const gzFile file = gzopen(absl::StrCat(kFolder, "odd_strings.json.gz").c_str(), "rb");
  std::string text(4 << 20, '\0');
  const int bytes = gzread(file, text.data(), static_cast<unsigned>(text.size()));
  gzclose(file);
  EXPECT_GT(bytes, 0);
  EXPECT_LT(bytes, std::ssize(text));
  const json recorded = json::parse(text.substr(0, bytes));
  return {recorded["strings"], recorded["tokens"]};
}

Tokenizer HfTokenizer() {
  absl::StatusOr<Tokenizer> tokenizer = ReadTokenizer(kHf);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::string Decode(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens) {
  std::string text;
  for (const int32_t token : tokens) absl::StrAppend(&text, tokenizer.piece(token));
  return text;
}

std::vector<std::string> WordsOf(absl::string_view text) {
  std::vector<std::string> words;
  SplitWords(text, [&](absl::string_view word) { words.emplace_back(word); });
  return words;
}

TEST(SplitWordsTest, IsGpt2s) {
  EXPECT_THAT(WordsOf("I'm  here, 24h\n"),
              ElementsAre("I", "'m", " ", " here", ",", " 24", "h", "\n"));
  EXPECT_THAT(WordsOf("a \n\n b\t"), ElementsAre("a", " \n\n", " b", "\t"));
  EXPECT_THAT(WordsOf("We'LL can't"), ElementsAre("We", "'", "LL", " can", "'t"));
  EXPECT_THAT(WordsOf("\u00a0\u3000x \u3000"), ElementsAre("\u00a0", "\u3000", "x", " \u3000"));
  EXPECT_THAT(WordsOf("ab\xff\xfe c"), ElementsAre("ab", "\xff", "\xfe", " c"));
  EXPECT_THAT(WordsOf(""), IsEmpty());
}

TEST(TokenizerTest, OddStringsHaveHuggingFacesTokens) {
  const Tokenizer tokenizer = HfTokenizer();
  const Recorded odd = OddStrings();
  ASSERT_EQ(odd.strings.size(), 10'000u);
  for (size_t i = 0; i < odd.strings.size(); ++i) {
    ASSERT_EQ(tokenizer.Encode(odd.strings[i]), odd.tokens[i]) << json(odd.strings[i]);
    ASSERT_EQ(Decode(tokenizer, odd.tokens[i]), odd.strings[i]);
  }
}

TEST(TokenizerTest, AnyBytesAreEncodedAndComeBack) {
  const Tokenizer tokenizer = HfTokenizer();
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(random() % 40, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random() % (round % 2 == 0 ? 256 : 4));
    ASSERT_EQ(Decode(tokenizer, tokenizer.Encode(bytes)), bytes);
  }
}

TEST(TokenizerTest, BytesAreTokens) {
  const Tokenizer bytes = Tokenizer::OfBytes();
  EXPECT_TRUE(bytes.is_of_bytes());
  EXPECT_THAT(bytes.Encode("A\n\xff"), ElementsAre(65, 10, 255));
  EXPECT_EQ(bytes.Find("\n"), 10);
  EXPECT_EQ(bytes.piece(-1), "");
  EXPECT_EQ(bytes.piece(256), "");
}

// A word of n bytes takes n log n: this one would take hours if it took n^2 with these constants.
TEST(TokenizerTest, LongWordsTakeNoQuadraticTime) {
  const Tokenizer tokenizer = HfTokenizer();
  const std::string word(4'000'000, 'a');
  EXPECT_EQ(Decode(tokenizer, tokenizer.Encode(word)), word);
}

TEST(TokenizerTest, AddsASpace) {
  TokenizerParts parts = Tokenizer::OfBytes().parts();
  parts.adds_space = true;
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Make(parts);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_THAT(tokenizer->Encode("a"), ElementsAre(' ', 'a'));
  EXPECT_THAT(tokenizer->Encode(" a"), ElementsAre(' ', 'a'));
  EXPECT_THAT(tokenizer->Encode(""), IsEmpty());
  EXPECT_FALSE(tokenizer->is_of_bytes());
}

TEST(TokenizerTest, TheLongestAddedTokenIsFound) {
  TokenizerParts parts = Tokenizer::OfBytes().parts();
  parts.pieces.insert(parts.pieces.end(), {"<a>", "<a><b>"});
  parts.added = {{256}, {257}};
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Make(parts);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_THAT(tokenizer->Encode("x<a><b><a>\xff<a"), ElementsAre('x', 257, 256, 255, '<', 'a'));
}

TEST(TokenizerTest, PartsThatDoNotFitAreRefused) {
  const auto error = [](void (*damage)(TokenizerParts&)) {
    TokenizerParts parts = Tokenizer::OfBytes().parts();
    damage(parts);
    return std::string(Tokenizer::Make(std::move(parts)).status().message());
  };
  EXPECT_EQ(error([](TokenizerParts&) {}), "");
  EXPECT_THAT(error([](TokenizerParts& parts) { parts.pieces[7].clear(); }),
              HasSubstr("no token stands for byte 7;"));
  EXPECT_THAT(error([](TokenizerParts& parts) { parts.pieces.push_back("a"); }),
              HasSubstr("tokens 97 and 256 have the same bytes"));
  EXPECT_THAT(error([](TokenizerParts& parts) {
                parts.merges.push_back({97, 98});
              }),
              HasSubstr("merge 0 yields \"ab\", which is not in the vocabulary"));
  EXPECT_THAT(error([](TokenizerParts& parts) {
                parts.merges.push_back({97, 256});
              }),
              HasSubstr("merge 0 joins tokens 97 and 256, but there are only 256 tokens"));
  EXPECT_THAT(error([](TokenizerParts& parts) { parts.added.push_back({256}); }),
              HasSubstr("added token 256"));
}

// ---- Learning ----

TEST(LearnTokenizerTest, MergesAreThoseOfHuggingFacesTrainer) {
  const Recorded odd = OddStrings();
  const std::vector<absl::string_view> texts(odd.strings.begin(), odd.strings.end());
  const absl::StatusOr<Tokenizer> learned = LearnTokenizer(texts, 1000);
  ASSERT_TRUE(learned.ok()) << learned.status();
  TokenizerParts expected = HfTokenizer().parts();
  expected.pieces.resize(1000);
  EXPECT_EQ(learned->parts().pieces, expected.pieces);
  EXPECT_EQ(learned->parts().merges, expected.merges);
}

TEST(LearnTokenizerTest, SmallTexts) {
  const std::vector<absl::string_view> texts = {"aaaa bab", "ab"};
  const absl::StatusOr<Tokenizer> learned = LearnTokenizer(texts, 258);
  ASSERT_TRUE(learned.ok()) << learned.status();
  EXPECT_EQ(learned->piece(256), "aa");
  EXPECT_EQ(learned->piece(257), "ab");
  EXPECT_EQ(LearnTokenizer(texts, 255).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(LearnTokenizer(texts, 300).status().message(),
              HasSubstr("the text yields at most 261 tokens, fewer than the vocabulary of 300"));
}

// ---- Files ----

class TokenizerFileTest : public testing::Test {
 protected:
  TokenizerFileTest() { std::filesystem::create_directories(folder_); }
  ~TokenizerFileTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    const absl::string_view pieces[] = {text};
    ASSERT_TRUE(WriteFileAtomically(folder_ + "/" + name, pieces).ok());
  }
  std::string ErrorOf(const json& tokenizer) {
    Write("tokenizer.json", tokenizer.dump());
    return std::string(ReadTokenizer(folder_).status().message());
  }
  static json Hf() { return json::parse(*ReadFile(kHf)); }

  const std::string folder_ = absl::StrCat(
      testing::TempDir(), "/", testing::UnitTest::GetInstance()->current_test_info()->name());
};

void ExpectEqual(const TokenizerParts& a, const TokenizerParts& b) {
  EXPECT_EQ(a.pieces, b.pieces);
  EXPECT_EQ(a.merges, b.merges);
  EXPECT_EQ(a.added, b.added);
  EXPECT_EQ(a.adds_space, b.adds_space);
  EXPECT_EQ(a.named, b.named);
}

TEST_F(TokenizerFileTest, WhatIsWrittenIsRead) {
  EXPECT_EQ(TokenizerBeside(folder_ + "/model.safetensors"), "");
  for (const Tokenizer& tokenizer : {HfTokenizer(), Tokenizer::OfBytes()}) {
    Write("tokenizer.json", TokenizerJson(tokenizer));
    EXPECT_EQ(TokenizerBeside(folder_ + "/model.safetensors"), folder_);
    const absl::StatusOr<Tokenizer> read = ReadTokenizer(folder_);
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectEqual(read->parts(), tokenizer.parts());
  }
}

TEST_F(TokenizerFileTest, VocabularyAndMerges) {
  const json hf = Hf();
  json vocabulary = hf["model"]["vocab"];
  vocabulary[kEndOfText] = 1000;
  // A token of GPT-2's that is also the name of a part of tokenizer.json.
  TokenizerParts expected = HfTokenizer().parts();
  vocabulary["model"] = 1001;
  expected.pieces.push_back("model");
  std::string merges = "#version: 0.2\n";
  for (const json& merge : hf["model"]["merges"]) {
    absl::StrAppend(&merges, merge[0].get<std::string>(), " ", merge[1].get<std::string>(), "\n");
  }
  Write("vocab.json", vocabulary.dump());
  EXPECT_EQ(TokenizerBeside(folder_ + "/model.safetensors"), "");
  Write("merges.txt", merges);
  for (const std::string& path : {folder_, folder_ + "/vocab.json"}) {
    const absl::StatusOr<Tokenizer> read = ReadTokenizer(path);
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectEqual(read->parts(), expected);
  }
}

// As transformers reads both, so that a folder that is read and saved keeps its tokens.
TEST_F(TokenizerFileTest, FlagsAndNamesAreKept) {
  TokenizerParts parts = HfTokenizer().parts();
  parts.pieces.insert(parts.pieces.end(), {"<tool>", "<pad>"});
  parts.added.insert(parts.added.end(),
                     {{1001, /*is_special=*/false, /*is_normalized=*/true}, {1002}});
  parts.named = {{"bos_token", 1000}, {"pad_token", 1002}};
  Write("tokenizer.json", TokenizerJson(*Tokenizer::Make(parts)));
  Write("tokenizer_config.json",
        R"({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
            "eos_token": null, "pad_token": {"content": "<pad>", "lstrip": false}})");
  const absl::StatusOr<Tokenizer> read = ReadTokenizer(folder_);
  ASSERT_TRUE(read.ok()) << read.status();
  ExpectEqual(read->parts(), parts);
  EXPECT_EQ(read->Named("pad_token"), 1002);
  EXPECT_EQ(read->Named("eos_token"), std::nullopt);
}

TEST_F(TokenizerFileTest, BadFilesBesideAreRefused) {
  Write("tokenizer.json", Hf().dump());
  const auto error = [&](const std::string& text) {
    Write("tokenizer_config.json", text);
    return std::string(ReadTokenizer(folder_).status().message());
  };
  EXPECT_EQ(error("{}"), "");
  EXPECT_THAT(error("{"), HasSubstr("tokenizer_config.json ends before its JSON is complete"));
  EXPECT_THAT(error(std::string(200'000, '[')), HasSubstr("config.json is nested too deeply"));
  EXPECT_THAT(error(R"({"add_prefix_space": 1})"),
              HasSubstr("config.json: add_prefix_space is 1; expected true or false"));
  EXPECT_THAT(error(R"({"pad_token": 7})"), HasSubstr("pad_token is 7; expected a token"));
  EXPECT_THAT(error(R"({"extra_special_tokens": [""]})"),
              HasSubstr("extra_special_tokens is \"\"; expected a token"));
  EXPECT_THAT(error(R"({"split_special_tokens": true})"), HasSubstr("only false is supported"));
  EXPECT_THAT(error(R"({"added_tokens_decoder": {"x": {"content": "a"}}})"),
              HasSubstr("added_tokens_decoder.x is {\"content\":\"a\"}; expected a token"));
  EXPECT_THAT(error(R"({"added_tokens_decoder": {"1000": {"content": "<|endoftext|>"}}})"),
              HasSubstr("\"<|endoftext|>\" appears twice, with different flags"));
  std::filesystem::remove(folder_ + "/tokenizer_config.json");
  Write("added_tokens.json", R"({"<tool>": "x"})");
  EXPECT_THAT(ReadTokenizer(folder_).status().message(),
              HasSubstr("added_tokens.json: <tool> is \"x\"; expected a number"));
}

// As GPT-2's own tokenizer.json is.
TEST_F(TokenizerFileTest, TheOldestFilesNameNoType) {
  json old = Hf();
  old["model"].erase("type");
  EXPECT_EQ(ErrorOf(old), "");
}

TEST_F(TokenizerFileTest, OtherKindsAreRefused) {
  json other = Hf();
  other["model"]["type"] = "Unigram";
  EXPECT_THAT(ErrorOf(other), HasSubstr("model.type is Unigram; only byte-level BPE"));
  other = Hf();
  other["pre_tokenizer"] = {{"type", "Sequence"}};
  EXPECT_THAT(ErrorOf(other), HasSubstr("pre_tokenizer is Sequence"));
  other = Hf();
  other["pre_tokenizer"] = nullptr;
  EXPECT_THAT(ErrorOf(other), HasSubstr("pre_tokenizer is null"));
  other = Hf();
  other["pre_tokenizer"]["use_regex"] = false;
  EXPECT_THAT(ErrorOf(other), HasSubstr("use_regex is false"));
  other = Hf();
  other["normalizer"] = {{"type", "Lowercase"}};
  EXPECT_THAT(ErrorOf(other), HasSubstr("normalizer is Lowercase"));
  other = Hf();
  other["post_processor"] = {{"type", "TemplateProcessing"}};
  EXPECT_THAT(ErrorOf(other), HasSubstr("post_processor is TemplateProcessing"));
  other = Hf();
  other["model"]["ignore_merges"] = true;
  EXPECT_THAT(ErrorOf(other), HasSubstr("model.ignore_merges is true"));
  other = Hf();
  other["added_tokens"][0]["lstrip"] = true;
  EXPECT_THAT(ErrorOf(other), HasSubstr("sets lstrip, which is not supported"));
}

TEST_F(TokenizerFileTest, MalformedFilesAreRefused) {
  EXPECT_THAT(ErrorOf(json::array()), HasSubstr("is not a JSON object"));
  json bad = Hf();
  bad["model"]["vocab"]["a"] = -1;
  EXPECT_THAT(ErrorOf(bad), HasSubstr("token \"a\" has the number -1"));
  bad["model"]["vocab"]["a"] = 16'000'000;
  EXPECT_THAT(ErrorOf(bad), HasSubstr("has the number 16000000, but there are 1001 tokens"));
  bad["model"]["vocab"]["a"] = "x";
  EXPECT_THAT(ErrorOf(bad), HasSubstr("has the number \"x\""));
  bad = Hf();
  bad["added_tokens"] = json::array();  // Else its number would not be the next one.
  bad["model"]["vocab"].erase("a");
  EXPECT_THAT(ErrorOf(bad), HasSubstr("uses pieces that are not in the vocabulary"));
  bad = Hf();
  bad["model"]["merges"].push_back("a b c");
  EXPECT_THAT(ErrorOf(bad), HasSubstr("\"a b c\", is not a pair"));
  bad["model"]["merges"] = 7;
  EXPECT_THAT(ErrorOf(bad), HasSubstr("has no list of merges"));
  bad = Hf();
  bad["model"]["vocab"] = 7;
  EXPECT_THAT(ErrorOf(bad), HasSubstr("the vocabulary is not an object"));
  bad = Hf();
  bad["added_tokens"] = json::array();
  bad["model"]["vocab"]["\u4e16"] = 2000;
  EXPECT_THAT(ErrorOf(bad), HasSubstr("is not made of characters that stand for bytes"));
  bad = Hf();
  bad["added_tokens"][0]["id"] = 3;
  EXPECT_NE(ErrorOf(bad), "");
  bad = Hf();
  bad["added_tokens"] = {7};
  EXPECT_NE(ErrorOf(bad), "");
}

TEST_F(TokenizerFileTest, MissingFilesAreNamed) {
  EXPECT_THAT(ReadTokenizer(folder_).status().message(),
              HasSubstr("has no tokenizer.json, nor vocab.json with merges.txt"));
  EXPECT_EQ(ReadTokenizer(folder_ + "/x.json").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TokenizerFileTest, AnyDamageIsAnErrorOrATokenizer) {
  const std::string text = *ReadFile(kHf);
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::string damaged = text;
    for (int i = 0; i < 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    if (round % 4 == 0) damaged.resize(random() % damaged.size());
    Write("tokenizer.json", damaged);
    const absl::StatusOr<Tokenizer> read = ReadTokenizer(folder_);
    if (!read.ok()) continue;
    EXPECT_EQ(Decode(*read, read->Encode("some text")), "some text");
  }
}

}  // namespace
}  // namespace evenkeel
