#include "evenkeel/trainer/gpt/hf_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Key;
using testing::UnorderedElementsAre;

TEST(HfFilesTest, AModelWithoutATokenizer) {
  const std::map<std::string, std::string> files = HfFiles({.vocabulary = 50257,
                                                            .context = 1024,
                                                            .layers = 12,
                                                            .width = 768,
                                                            .heads = 12,
                                                            .dropout = 0.1});
  EXPECT_THAT(files, UnorderedElementsAre(Key("config.json"), Key("generation_config.json")));
  const json config = json::parse(files.at("config.json"));
  EXPECT_EQ(config["architectures"], json::array({"GPT2LMHeadModel"}));
  EXPECT_EQ(config["vocab_size"], 50257);
  EXPECT_EQ(config["n_positions"], 1024);
  EXPECT_EQ(config["n_layer"], 12);
  EXPECT_EQ(config["n_embd"], 768);
  EXPECT_EQ(config["n_head"], 12);
  EXPECT_EQ(config["resid_pdrop"], 0.1);
  EXPECT_TRUE(config["eos_token_id"].is_null());
}

TEST(HfFilesTest, TheEndOfATextIsTheTokenizers) {
  TokenizerParts parts = Tokenizer::OfBytes().parts();
  parts.pieces.push_back(kEndOfText);
  parts.added = {{256}};
  parts.named = {{"bos_token", 256}, {"eos_token", 256}};
  GptOptions options{.vocabulary = 260, .context = 64};
  options.tokenizer = std::make_shared<const Tokenizer>(*Tokenizer::Make(std::move(parts)));
  const std::map<std::string, std::string> files = HfFiles(options);
  EXPECT_THAT(files, UnorderedElementsAre(Key("config.json"), Key("generation_config.json"),
                                          Key("tokenizer.json"), Key("tokenizer_config.json")));
  EXPECT_EQ(json::parse(files.at("config.json"))["eos_token_id"], 256);
  EXPECT_EQ(json::parse(files.at("generation_config.json"))["bos_token_id"], 256);
  const json reader = json::parse(files.at("tokenizer_config.json"));
  EXPECT_EQ(reader["eos_token"], kEndOfText);
  EXPECT_EQ(reader["model_max_length"], 64);
}

class ReadHfConfigTest : public testing::Test {
 protected:
  ReadHfConfigTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  absl::StatusOr<std::optional<HfConfig>> Read(absl::string_view config,
                                               absl::string_view generation = "") {
    Write("config.json", config);
    if (!generation.empty()) Write("generation_config.json", generation);
    return ReadHfConfig(folder_);
  }
  std::string ErrorOf(absl::string_view config, absl::string_view generation = "") {
    return std::string(Read(config, generation).status().message());
  }
  void Write(const std::string& name, absl::string_view text) {
    const absl::string_view pieces[] = {text};
    EXPECT_TRUE(WriteFileAtomically(folder_ + "/" + name, pieces).ok());
  }

  const std::string folder_ = testing::TempDir() + "/config";
};

TEST_F(ReadHfConfigTest, ReadsWhatIsWritten) {
  EXPECT_EQ(*ReadHfConfig(folder_), std::nullopt);
  GptOptions options{.vocabulary = 300, .context = 9, .layers = 3, .width = 28, .heads = 7};
  options.text_tokens = TextTokens{.begin = 1, .ends = {2, 7}, .pad = 3};
  const auto files = HfFiles(options);
  const HfConfig config = **Read(files.at("config.json"), files.at("generation_config.json"));
  EXPECT_EQ(config.vocabulary, 300);
  EXPECT_EQ(config.context, 9);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.width, 28);
  EXPECT_EQ(config.heads, 7);
  EXPECT_EQ(config.text_tokens.begin, 1);
  EXPECT_THAT(config.text_tokens.ends, ElementsAre(2, 7));
  EXPECT_EQ(config.text_tokens.pad, 3);
}

// As AutoConfig of transformers 4.57.6 and 5.15.1 reads the same files.
TEST_F(ReadHfConfigTest, TakesTheDefaultsAndAliasesOfTransformers) {
  const HfConfig usual = **Read(R"({"model_type": "gpt2"})");
  EXPECT_EQ(usual.heads, 12);
  EXPECT_EQ(usual.layers, 12);
  EXPECT_EQ(usual.vocabulary, 50257);
  EXPECT_EQ(usual.text_tokens.begin, 50256);
  EXPECT_THAT(usual.text_tokens.ends, ElementsAre(50256));
  EXPECT_EQ(usual.text_tokens.pad, std::nullopt);
  EXPECT_EQ((*Read(R"({"num_attention_heads": 4, "hidden_size": 32})"))->heads, 4);
  EXPECT_EQ((*Read(R"({"n_head": 4, "num_attention_heads": 4})"))->heads, 4);
  const HfConfig generation =
      **Read(R"({"bos_token_id": 1})", R"({"eos_token_id": [4, 5], "pad_token_id": 6})");
  EXPECT_EQ(generation.text_tokens.begin, std::nullopt);
  EXPECT_THAT(generation.text_tokens.ends, ElementsAre(4, 5));
}

TEST_F(ReadHfConfigTest, RefusesWhatIsComputedDifferently) {
  EXPECT_THAT(ErrorOf(R"({"model_type": "bert", "n_head": 3})"),
              HasSubstr("config.json: model_type is \"bert\"; only \"gpt2\" is supported"));
  EXPECT_THAT(ErrorOf(R"({"activation_function": "relu"})"),
              HasSubstr("activation_function is \"relu\"; only \"gelu_new\" is supported"));
  EXPECT_THAT(ErrorOf(R"({"layer_norm_epsilon": 1e-6})"), HasSubstr("layer_norm_epsilon is 1e-06"));
  EXPECT_THAT(ErrorOf(R"({"tie_word_embeddings": false})"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(ErrorOf(R"({"n_head": "x"})"), HasSubstr("n_head is \"x\""));
  EXPECT_THAT(ErrorOf(R"({"n_head": 0})"), HasSubstr("n_head is 0; expected a positive number"));
  EXPECT_THAT(ErrorOf(R"({"n_head": 4, "num_attention_heads": 8})"),
              HasSubstr("n_head is 4; but num_attention_heads is 8"));
  EXPECT_THAT(ErrorOf(R"({"n_embd": 4, "n_inner": 8})"), HasSubstr("n_inner is 8; only 16"));
  EXPECT_THAT(ErrorOf("{}", R"({"eos_token_id": "x"})"),
              HasSubstr("generation_config.json: eos_token_id is \"x\""));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("config.json is not a JSON object"));
  EXPECT_THAT(ErrorOf("version https://git-lfs.github.com/spec/v1\n"),
              HasSubstr("config.json is a Git LFS pointer; fetch the file"));
  EXPECT_THAT(ErrorOf("{"), HasSubstr("config.json ends before its JSON is complete"));
  // To copy or print the parsed value would exhaust the stack.
  EXPECT_THAT(ErrorOf(absl::StrCat(R"({"n_head": )", std::string(200'000, '['),
                                   std::string(200'000, ']'), "}")),
              HasSubstr("config.json is nested too deeply"));
}

}  // namespace
}  // namespace evenkeel
