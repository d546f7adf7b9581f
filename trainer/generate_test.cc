// Runs the program as a person does.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;
using testing::StartsWith;

constexpr char kHfTiny[] = "--weights=tests/testdata/gpt/hf_tiny.safetensors";

struct Outcome {
  int code = -1;
  std::string output;
};

// Returns the program's standard output, and with "2>&1" in the arguments its standard error too.
Outcome Generate(const std::string& arguments) {
  Outcome outcome;
  FILE* const pipe = popen(absl::StrCat("trainer/generate ", arguments).c_str(), "r");
  for (int c; (c = fgetc(pipe)) != EOF;) outcome.output.push_back(static_cast<char>(c));
  outcome.code = WEXITSTATUS(pclose(pipe));
  return outcome;
}

class GenerateTest : public testing::Test {
 protected:
  // A model of bytes with random weights.
  static void SetUpTestSuite() { Save("bytes.safetensors", /*seed=*/1); }
  static std::string PathOf(const std::string& name) {
    return absl::StrCat(testing::TempDir(), "/", name);
  }
  static void Save(const std::string& name, uint64_t seed) {
    std::filesystem::create_directories(std::filesystem::path(PathOf(name)).parent_path());
    const absl::StatusOr<std::unique_ptr<Gpt>> model =
        MakeGpt({.context = 8, .layers = 1, .width = 12, .heads = 3, .seed = seed});
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_TRUE(SaveModel(**model, PathOf(name)).ok());
  }
  static std::string Bytes() { return absl::StrCat("--weights=", PathOf("bytes.safetensors")); }
};

TEST_F(GenerateTest, WritesBytesBehindThePrompt) {
  const Outcome outcome = Generate(Bytes() + " --prompt='Once upon' --tokens=50");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.output, AllOf(StartsWith("Once upon"), SizeIs(9 + 50)));
  EXPECT_THAT(Generate(Bytes()).output,
              SizeIs(500));  // Without a prompt from the beginning of a text.
  EXPECT_EQ(Generate(Bytes() + " --prompt=x --tokens=0").output, "x");
}

TEST_F(GenerateTest, EqualSeedsWriteTheSame) {
  const std::string text = Generate(Bytes() + " --tokens=100 --seed=5").output;
  EXPECT_EQ(Generate(Bytes() + " --tokens=100 --seed=5").output, text);
  EXPECT_NE(Generate(Bytes() + " --tokens=100 --seed=6").output, text);
}

TEST_F(GenerateTest, OneBestTokenIsTemperatureZero) {
  const std::string greedy = Generate(Bytes() + " --tokens=100 --temperature=0").output;
  EXPECT_EQ(Generate(Bytes() + " --tokens=100 --top_k=1 --seed=3").output, greedy);
  EXPECT_EQ(Generate(Bytes() + " --tokens=100 --temperature=1e-30 --seed=4").output, greedy);
}

TEST_F(GenerateTest, WritesTheTokenThatOtherSoftwareHoldsForTheBest) {
  const auto recorded = SafetensorsFile::Read("tests/testdata/gpt/hf_tiny_scores.safetensors");
  ASSERT_TRUE(recorded.ok()) << recorded.status();
  std::vector<int64_t> tokens(15);
  std::vector<float> scores(15 * 40);
  std::memcpy(tokens.data(), recorded->Find("tokens")->bytes.data(),
              tokens.size() * sizeof(int64_t));
  std::memcpy(scores.data(), recorded->Find("scores")->bytes.data(), scores.size() * sizeof(float));
  const int64_t best = std::max_element(scores.end() - 40, scores.end()) - (scores.end() - 40);

  const Outcome outcome = Generate(absl::StrCat(
      kHfTiny, " --heads=2 --temperature=0 --tokens=1 --prompt=", absl::StrJoin(tokens, ",")));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.output, absl::StrCat(absl::StrJoin(tokens, "\n"), "\n", best, "\n"));
}

TEST_F(GenerateTest, TakesTheNewestCheckpointOfAFolder) {
  Save("run/step-000000009/model.safetensors", /*seed=*/2);
  Save("run/step-000000010/model.safetensors", /*seed=*/1);
  const std::string newest = Generate(Bytes() + " --temperature=0").output;
  EXPECT_EQ(Generate(absl::StrCat("--weights=", PathOf("run"), " --temperature=0")).output, newest);
  EXPECT_NE(
      Generate(absl::StrCat("--weights=", PathOf("run/step-000000009"), " --temperature=0")).output,
      newest);
}

TEST_F(GenerateTest, SaysInOneSentenceWhatIsWrong) {
  const struct {
    std::string arguments, message;
  } cases[] = {
      {"", "--weights is missing; pass a safetensors file or a folder of checkpoints; see --help"},
      {"--weights=nothing", "nothing"},
      {"--weights=tests/testdata/gpt/make_hf_tiny.py", "tests/testdata/gpt/make_hf_tiny.py"},
      {Bytes() + " --temperature=-1", "temperature -1 must not be negative"},
      {Bytes() + " --temperature=nan", "temperature nan must not be negative"},
      {Bytes() + " --top_k=-2", "top_k -2 must not be negative"},
      {Bytes() + " --tokens=-1", "the number of tokens, -1, must not be negative"},
      {Bytes() + " --heads=5", "5 heads"},
      {Bytes() + " --heads=0", "heads"},
      {Bytes() + " word", "unexpected argument \"word\"; see --help"},
      {absl::StrCat(kHfTiny, " --prompt=text"),
       "--prompt: this model has 40 tokens and no tokenizer beside it; pass --tokenizer, or token "
       "numbers, like 17,4; \"text\" is not one of them"},
      {absl::StrCat(kHfTiny, " --tokenizer=nothing"), "nothing"},
      {absl::StrCat(kHfTiny, " --tokenizer=tests/testdata/tokenizer/hf_tokenizer.json"),
       " has 1001 tokens, the model only 40; pass the model's tokenizer with --tokenizer"},
      {absl::StrCat(kHfTiny, " --prompt=1,40"), "\"40\" is not one of them"},
      {absl::StrCat(kHfTiny, " --prompt=-1"), "\"-1\" is not one of them"},
      {Bytes() + " --prompt=- </tmp", "cannot read the prompt from stdin: Is a directory"},
      {Bytes() + " >/dev/full", "cannot write to stdout: No space left on device"},
  };
  for (const auto& wrong : cases) {
    const Outcome outcome = Generate("2>&1 " + wrong.arguments);
    EXPECT_EQ(outcome.code, 1) << wrong.arguments;
    EXPECT_THAT(outcome.output, AllOf(StartsWith("generate: "), HasSubstr(wrong.message)))
        << wrong.arguments;
    EXPECT_EQ(std::ranges::count(outcome.output, '\n'), 1) << outcome.output;
  }
}

TEST_F(GenerateTest, ExplainsItsFlagsInGroups) {
  const Outcome outcome = Generate("--help");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("Model:\n  --weights=PATH"), HasSubstr("\nText:\n  --prompt=TEXT"),
                    HasSubstr("(default 500)")));
}

}  // namespace
}  // namespace evenkeel
