// Training and generating with a tokenizer, and folders in Hugging Face's format.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/train_program.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

namespace evenkeel {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

std::string TempPath(const std::string& name) {
  return absl::StrCat(testing::TempDir(), "/words/", name);
}

// 120 kB of sentences that can be learned.
void WriteText() {
  std::filesystem::create_directories(TempPath(""));
  std::ofstream out(TempPath("text.txt"));
  for (int i = 0; i < 2600; ++i) {
    out << "The " << (i % 3 == 0 ? "quick brown fox" : "lazy old dog") << " jumps over the "
        << (i % 2 == 0 ? "garden fence" : "broken gate") << ".\n";
  }
}

Ended TrainWords(std::vector<std::string> flags) {
  const std::vector<std::string> common = {"--model=gpt", "--preset=tiny", "--epochs=4",
                                           "--warmup=10", "--data=" + TempPath("text.txt")};
  flags.insert(flags.begin(), common.begin(), common.end());
  return Train(flags);
}

Ended Generate(const std::string& weights, std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"trainer/generate", "--weights=" + weights, "--temperature=0"});
  return Run(flags);
}

json ReadJson(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  EXPECT_TRUE(text.ok()) << text.status();
  return json::parse(text.value_or("{}"));
}

class WordsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    WriteText();
    trained_ = TrainWords({"--vocabulary=300", "--max_steps=60", "--save=" + TempPath("saved/"),
                           "--checkpoint_dir=" + TempPath("checkpoints")});
    ASSERT_EQ(trained_.code, 0) << trained_.err;
  }
  static inline Ended trained_;
};

TEST_F(WordsTest, LossIsPerByteOfTheText) {
  EXPECT_THAT(trained_.out, HasSubstr("test_bits_per_byte="));
  double bits = 8;
  ASSERT_TRUE(absl::SimpleAtod(
      Lines(
          std::vector<std::string>(absl::StrSplit(trained_.out, "test_bits_per_byte=")).back())[0],
      &bits));
  EXPECT_LT(bits, 1.5);  // It begins with 8.2 bits per token; a token has some 5 bytes.
  EXPECT_GT(bits, 0.01);
}

TEST_F(WordsTest, FoldersHaveWhatTransformersOpens) {
  for (const std::string& folder : {TempPath("saved"), TempPath("checkpoints/step-000000060")}) {
    const json config = ReadJson(folder + "/config.json");
    EXPECT_EQ(config["model_type"], "gpt2");
    EXPECT_EQ(config["vocab_size"], 300);
    EXPECT_EQ(config["n_layer"], 2);
    EXPECT_EQ(config["n_head"], 2);
    EXPECT_EQ(config["n_embd"], 64);
    EXPECT_EQ(config["n_positions"], 64);
    EXPECT_TRUE(config["eos_token_id"].is_null());
    EXPECT_TRUE(ReadJson(folder + "/generation_config.json").contains("eos_token_id"));
    EXPECT_EQ(ReadJson(folder + "/tokenizer_config.json")["model_max_length"], 64);
    const absl::StatusOr<Tokenizer> tokenizer = ReadTokenizer(folder);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(tokenizer->size(), 300);
    EXPECT_EQ(tokenizer->Encode(" jumps").size(), 1u);
  }
}

TEST_F(WordsTest, APromptIsContinuedInWords) {
  const Ended ended = Generate(TempPath("saved"), {"--prompt=The quick", "--tokens=12"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, StartsWith("The quick brown fox jumps over the "));
  EXPECT_EQ(Generate(TempPath("checkpoints"), {"--prompt=The quick", "--tokens=12"}).out,
            ended.out);
  EXPECT_EQ(Generate(TempPath("saved"), {"--tokens=0"}).out, "");
  EXPECT_EQ(evenkeel::Run(
                {"/bin/sh", "-c",
                 absl::StrCat("printf 'The quick' | trainer/generate --weights=", TempPath("saved"),
                              " --temperature=0 --prompt=- --tokens=12")})
                .out,
            ended.out);
}

// The flags name no size: all come from the folder, as does the tokenizer.
TEST_F(WordsTest, AFolderIsTrainedFurther) {
  for (const std::string& from :
       {TempPath("saved"), TempPath("checkpoints"), TempPath("saved/model.safetensors")}) {
    const Ended further = Train({"--model=gpt", "--data=" + TempPath("text.txt"), "--init=" + from,
                                 "--lr=0.001", "--max_steps=1", "--save=" + TempPath("further/")});
    ASSERT_EQ(further.code, 0) << further.err;
    EXPECT_EQ(ReadJson(TempPath("further/config.json")), ReadJson(TempPath("saved/config.json")));
    EXPECT_EQ(ReadJson(TempPath("further/tokenizer.json")),
              ReadJson(TempPath("saved/tokenizer.json")));
    // It does not begin anew.
    EXPECT_THAT(Generate(TempPath("further"), {"--prompt=The quick", "--tokens=12"}).out,
                StartsWith("The quick brown fox jumps over the "));
  }
}

TEST_F(WordsTest, AFolderKeepsItsTokens) {
  const std::string from = TempPath("tokens");
  ASSERT_EQ(TrainWords({"--tokenizer=" + TempPath("saved"), "--vocabulary=320", "--max_steps=1",
                        "--save=" + from + "/"})
                .code,
            0);
  const auto change = [&](const std::string& name, const json& changes) {
    json changed = ReadJson(from + "/" + name);
    changed.merge_patch(changes);
    std::ofstream(from + "/" + name) << changed;
  };
  const auto token = [](int id, const char* content, bool is_special) -> json {
    return {{"id", id},
            {"content", content},
            {"special", is_special},
            {"lstrip", false},
            {"normalized", !is_special},
            {"rstrip", false},
            {"single_word", false}};
  };
  change("tokenizer.json",
         {{"added_tokens", json::array({token(300, "<tool>", false), token(301, "<pad>", true)})}});
  change("tokenizer_config.json", {{"bos_token", "<tool>"}, {"pad_token", "<pad>"}});
  const json ids = {{"bos_token_id", 300}, {"eos_token_id", {7, 301}}, {"pad_token_id", 301}};
  change("config.json", ids);
  change("generation_config.json", ids);
  const Ended kept = Train({"--model=gpt", "--data=" + TempPath("text.txt"), "--init=" + from,
                            "--max_steps=1", "--save=" + TempPath("kept/")});
  ASSERT_EQ(kept.code, 0) << kept.err;
  EXPECT_EQ(ReadJson(TempPath("kept/tokenizer.json"))["added_tokens"],
            ReadJson(from + "/tokenizer.json")["added_tokens"]);
  for (const char* const name : {"tokenizer_config.json", "config.json", "generation_config.json"})
    EXPECT_EQ(ReadJson(TempPath("kept/") + name), ReadJson(from + "/" + name)) << name;
  change("generation_config.json", {{"bos_token_id", 999}});
  const Ended sampled = Train({"--model=gpt", "--data=" + TempPath("text.txt"), "--init=" + from,
                               "--max_steps=1", "--sample_every=1"});
  EXPECT_THAT(sampled.err, HasSubstr("--sample_prompt: bos_token_id, with which a text begins, is "
                                     "999, but the model has only 320 tokens; pass a prompt"));
}

TEST_F(WordsTest, SizesThatDifferAreRefused) {
  const struct {
    std::string flag, message;
  } cases[] = {
      {"--layers=3", "is a gpt with layers 2, but --layers is 3"},
      {"--preset=mini", "is a gpt with layers 2, but --layers is 4"},
      {"--context=65", "is a gpt with context 64, but --context is 65"},
      {"--vocabulary=256", "is a gpt with vocabulary 300, but --vocabulary is 256"},
  };
  for (const auto& wrong : cases) {
    const Ended ended = Train({"--model=gpt", "--data=" + TempPath("text.txt"),
                               "--init=" + TempPath("saved"), wrong.flag});
    EXPECT_EQ(ended.code, 1);
    EXPECT_THAT(ended.err, HasSubstr(wrong.message));
    EXPECT_EQ(Lines(ended.err).size(), 1u) << ended.err;
  }
}

TEST_F(WordsTest, ASmallerContextIsOfTheDataOnly) {
  const Ended ended =
      Train({"--model=gpt", "--data=" + TempPath("text.txt"), "--init=" + TempPath("saved"),
             "--context=32", "--max_steps=1", "--save=" + TempPath("shorter/")});
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ReadJson(TempPath("shorter/config.json"))["n_positions"], 64);
}

TEST_F(WordsTest, ATokenizerIsReadFromAFile) {
  const Ended ended = TrainWords({"--tokenizer=" + TempPath("saved/tokenizer.json"),
                                  "--max_steps=1", "--save=" + TempPath("given/")});
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ReadJson(TempPath("given/tokenizer.json")), ReadJson(TempPath("saved/tokenizer.json")));
  const Ended padded = TrainWords({"--tokenizer=" + TempPath("saved"), "--vocabulary=320",
                                   "--max_steps=1", "--save=" + TempPath("padded/")});
  ASSERT_EQ(padded.code, 0) << padded.err;
  EXPECT_EQ(ReadJson(TempPath("padded/config.json"))["vocab_size"], 320);
  EXPECT_EQ(Generate(TempPath("padded"), {"--prompt=The", "--tokens=3"}).code, 0);
  EXPECT_THAT(TrainWords({"--tokenizer=" + TempPath("saved"), "--vocabulary=299"}).err,
              HasSubstr("has 300 tokens, but the vocabulary is 299"));
}

TEST_F(WordsTest, BytesHaveATokenizerToo) {
  ASSERT_EQ(TrainWords({"--max_steps=1", "--save=" + TempPath("bytes/")}).code, 0);
  const absl::StatusOr<Tokenizer> tokenizer = ReadTokenizer(TempPath("bytes"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_TRUE(tokenizer->is_of_bytes());
  EXPECT_EQ(Generate(TempPath("bytes"), {"--prompt=The", "--tokens=3"}).out.size(), 6u);
}

// The same command resumes with the same tokenizer, which is made again.
TEST_F(WordsTest, ARunOfWordsIsResumed) {
  const auto run = [](int steps, const std::string& save) {
    return TrainWords({"--vocabulary=300", absl::StrCat("--max_steps=", steps), "--lr_decay=none",
                       "--checkpoint_dir=" + TempPath("resumed"), "--save=" + TempPath(save)});
  };
  ASSERT_EQ(run(5, "5.safetensors").code, 0);
  const Ended further = run(10, "10.safetensors");
  ASSERT_EQ(further.code, 0) << further.err;
  const Ended whole = TrainWords({"--vocabulary=300", "--max_steps=10", "--lr_decay=none",
                                  "--save=" + TempPath("whole.safetensors")});
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(MaxDifference(ReadWeights(TempPath("10.safetensors")),
                          ReadWeights(TempPath("whole.safetensors"))),
            0);
}

}  // namespace
}  // namespace evenkeel
