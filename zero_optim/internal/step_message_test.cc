#include "evenkeel/zero_optim/internal/step_message.h"

#include <cmath>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

StepMessage MessageOf(const UpdateRule& rule, int params) {
  StepMessage step{.rules = {rule, AdamW{}},
                   .options = {.grad_scale = 0.3, .skip = params % 2 == 0}};
  for (int i = 0; i < params; ++i) step.sources.push_back(static_cast<GradientSource>(i % 3));
  for (int i = 0; i < 2 * params && params % 4 == 1; ++i)
    step.hashes.push_back(static_cast<uint64_t>(i) << 40);
  return step;
}

TEST(StepMessageTest, ArrivesAsItWasSent) {
  const UpdateRule rules[] = {
      Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.2, .nesterov = true},
      Adam{.learning_rate = 1, .beta1 = 0.2, .beta2 = 0.3, .epsilon = 0.4, .weight_decay = 0.5},
      AdamW{.learning_rate = 1, .beta1 = 0.2, .beta2 = 0.3, .epsilon = 0.4, .weight_decay = 0.5}};
  for (const UpdateRule& rule : rules) {
    for (int params : {0, 1, 3, 4, 5, 1000}) {
      StepMessage step = MessageOf(rule, params);
      if (params % 3 == 1) step.options.clip = ClipOptions{.max_norm = 3, .norm = kInfinityNorm};
      step.options.skip_nonfinite = params % 3 == 0;
      const auto parsed = StepMessage::Parse(step.Serialize(), params);
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(*parsed, step);
    }
  }
}

TEST(StepMessageTest, HasFourSourcesInAByte) {
  EXPECT_EQ(MessageOf(AdamW{}, 1000).Serialize().size(),
            MessageOf(AdamW{}, 0).Serialize().size() + 250);
}

TEST(StepMessageTest, RefusesWhatIsCutOffTooLongOrForOtherParameters) {
  const std::string bytes = MessageOf(AdamW{}, 9).Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(absl::IsInvalidArgument(StepMessage::Parse(bytes.substr(0, size), 9).status()))
        << size;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(StepMessage::Parse(bytes + "x", 9).status()));
  std::string padded = bytes;  // The last byte has the ninth source alone.
  padded.back() = static_cast<char>(padded.back() | 0x80);
  EXPECT_TRUE(absl::IsInvalidArgument(StepMessage::Parse(padded, 9).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(StepMessage::Parse(bytes, 4).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      StepMessage::Parse(MessageOf(AdamW{.beta1 = 2}, 9).Serialize(), 9).status()));
}

TEST(StepMessageTest, SurvivesAnyBytes) {
  std::mt19937 random(3);
  const std::string good = MessageOf(Sgd{.momentum = 0.9}, 17).Serialize();
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const auto parsed = StepMessage::Parse(bytes, 17);
    if (!parsed.ok()) continue;
    EXPECT_EQ(parsed->sources.size(), 17u);
    EXPECT_TRUE(Validate(parsed->rules[0]).ok());
  }
}

TEST(CheckOptionsTest, WantsAFiniteScale) {
  EXPECT_TRUE(CheckOptions({}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOptions({.grad_scale = INFINITY})));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOptions({.grad_scale = NAN})));
}

TEST(CheckOptionsTest, WantsAPositiveLimitAndANormOfAtLeastOne) {
  EXPECT_TRUE(CheckOptions({.clip = ClipOptions{.max_norm = INFINITY, .norm = INFINITY}}).ok());
  for (const ClipOptions& clip :
       {ClipOptions{.max_norm = 0}, ClipOptions{.max_norm = -1}, ClipOptions{.max_norm = NAN},
        ClipOptions{.norm = 0.5}, ClipOptions{.norm = NAN}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckOptions({.clip = clip})));
  }
}

}  // namespace
}  // namespace evenkeel::internal
