#include "evenkeel/trainer/gpt/generate_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

// Ten tokens, of which each is mostly followed by the next one, after 9 by 0. Remembers what it was
// shown.
class Counting : public Gpt {
 public:
  const GptOptions& options() const override { return options_; }
  absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) override {
    if (std::ranges::any_of(tokens, [](int32_t token) { return token < 0 || token > 9; })) {
      return absl::InvalidArgumentError("there are ten tokens");
    }
    shown.emplace_back(tokens.begin(), tokens.end());
    scores_.assign(10, 0);
    scores_[(tokens.back() + 1) % 10] = 3;
    return scores_;
  }
  int64_t ActivationBytes() const override { return 0; }
  std::vector<std::vector<int32_t>> shown;
  void Set(TextTokens tokens, std::shared_ptr<const Tokenizer> tokenizer = nullptr) {
    options_.text_tokens = std::move(tokens);
    options_.tokenizer = std::move(tokenizer);
  }

 protected:
  absl::Status Check(const Batch&) const override {
    return absl::UnimplementedError("is not trained");
  }
  absl::StatusOr<PendingResult> DoForward(const Batch&, Mode, const PassOptions&) override {
    return absl::UnimplementedError("is not trained");
  }
  absl::Status DoBackward(GradientSink&) override {
    return absl::UnimplementedError("is not trained");
  }

 private:
  GptOptions options_ = {.vocabulary = 10, .context = 3};
  std::vector<float> scores_;
};

std::vector<int32_t> Generate(const std::vector<int32_t>& prompt, const GenerateOptions& options) {
  Counting model;
  std::vector<int32_t> tokens;
  const absl::Status status = GenerateTokens(model, prompt, options, [&](int32_t token) {
    tokens.push_back(token);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return tokens;
}

TEST(GenerateTokensTest, GoesOnFromThePrompt) {
  EXPECT_THAT(Generate({5, 7}, {.count = 4, .sample = {.temperature = 0}}),
              ElementsAre(8, 9, 0, 1));
  EXPECT_THAT(Generate({5}, {.count = 0}), IsEmpty());
}

TEST(GenerateTokensTest, ShowsTheModelNoMoreThanItsContext) {
  Counting model;
  const auto ignore = [](int32_t) { return absl::OkStatus(); };
  ASSERT_TRUE(
      GenerateTokens(model, {1, 2}, {.count = 3, .sample = {.temperature = 0}}, ignore).ok());
  EXPECT_THAT(model.shown,
              ElementsAre(ElementsAre(1, 2), ElementsAre(1, 2, 3), ElementsAre(2, 3, 4)));
}

TEST(GenerateTokensTest, StopsAtAnEnd) {
  Counting model;
  model.Set({.ends = {50256, 8, 3}});
  std::vector<int32_t> tokens;
  const auto keep = [&](int32_t token) { return tokens.push_back(token), absl::OkStatus(); };
  ASSERT_TRUE(GenerateTokens(model, {5}, {.sample = {.temperature = 0}}, keep).ok());
  EXPECT_THAT(tokens, ElementsAre(6, 7));
}

TEST(GenerateTextTest, AnEmptyPromptIsTheBeginning) {
  const auto bytes = std::make_shared<const Tokenizer>(Tokenizer::OfBytes());
  const auto ignore = [](absl::string_view) { return absl::OkStatus(); };
  Counting model;
  model.Set({.begin = 4, .ends = {6}}, bytes);
  ASSERT_TRUE(GenerateText(model, "", {.sample = {.temperature = 0}}, ignore).ok());
  EXPECT_THAT(model.shown, ElementsAre(ElementsAre(4), ElementsAre(4, 5)));
  model.Set({.begin = 50256}, bytes);
  EXPECT_EQ(GenerateText(model, "", {}, ignore),
            absl::InvalidArgumentError("bos_token_id, with which a text begins, is 50256, but the "
                                       "model has only 10 tokens; pass a prompt"));
}

TEST(GenerateTokensTest, EqualSeedsGiveEqualTokens) {
  const std::vector<int32_t> tokens = Generate({0}, {.count = 200, .seed = 1});
  EXPECT_THAT(tokens, SizeIs(200));
  EXPECT_EQ(Generate({0}, {.count = 200, .seed = 1}), tokens);
  EXPECT_NE(Generate({0}, {.count = 200, .seed = 2}), tokens);
}

TEST(GenerateTokensTest, EndsWithTheFirstError) {
  Counting model;
  int calls = 0;
  const auto fail_second = [&](int32_t) {
    return ++calls < 2 ? absl::OkStatus() : absl::DataLossError("pipe");
  };
  EXPECT_EQ(GenerateTokens(model, {0}, {}, fail_second), absl::DataLossError("pipe"));
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(GenerateTokens(model, {10}, {}, fail_second),
            absl::InvalidArgumentError("there are ten tokens"));
  EXPECT_EQ(GenerateTokens(model, {}, {}, fail_second),
            absl::InvalidArgumentError("the prompt is empty; at least one token is required"));
  EXPECT_EQ(GenerateTokens(model, {0}, {.count = -1}, fail_second),
            absl::InvalidArgumentError("the number of tokens, -1, must not be negative"));
  EXPECT_EQ(GenerateTokens(model, {0}, {.count = 0, .sample = {.temperature = -1}}, fail_second),
            absl::InvalidArgumentError("temperature -1 must not be negative"));
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace evenkeel
