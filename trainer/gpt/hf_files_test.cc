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
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

namespace evenkeel {
namespace {

using nlohmann::json;
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

absl::StatusOr<std::optional<int64_t>> HeadsOf(absl::string_view config) {
  const std::string folder = testing::TempDir() + "/config";
  std::filesystem::create_directories(folder);
  const absl::string_view pieces[] = {config};
  EXPECT_TRUE(WriteFileAtomically(folder + "/config.json", pieces).ok());
  return HeadsInConfig(folder);
}

TEST(HeadsInConfigTest, ReadsWhatIsWritten) {
  EXPECT_EQ(*HeadsOf(HfFiles({.heads = 7}).at("config.json")), 7);
  EXPECT_EQ(*HeadsOf("{}"), std::nullopt);
  EXPECT_EQ(*HeadsInConfig(testing::TempDir() + "/nowhere"), std::nullopt);
  // The file belongs to something else in the folder.
  EXPECT_EQ(*HeadsOf(R"({"model_type": "bert", "n_head": 3})"), std::nullopt);
}

TEST(HeadsInConfigTest, RefusesWhatIsComputedDifferently) {
  const auto error = [](absl::string_view config) {
    return std::string(HeadsOf(config).status().message());
  };
  EXPECT_THAT(error(R"({"activation_function": "relu"})"),
              HasSubstr("activation_function is \"relu\"; only \"gelu_new\" is supported"));
  EXPECT_THAT(error(R"({"layer_norm_epsilon": 1e-6})"), HasSubstr("layer_norm_epsilon is 1e-06"));
  EXPECT_THAT(error(R"({"tie_word_embeddings": false})"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(error(R"({"n_head": "x"})"), HasSubstr("n_head is \"x\""));
  EXPECT_THAT(error(R"({"n_head": 0})"), HasSubstr("n_head is 0"));
  EXPECT_THAT(error("[]"), HasSubstr("is not a JSON object"));
  EXPECT_THAT(error("{"), HasSubstr("config.json: is not a JSON object"));
}

}  // namespace
}  // namespace evenkeel
