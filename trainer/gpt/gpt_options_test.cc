#include "evenkeel/trainer/gpt/gpt_options.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"

namespace evenkeel {
namespace {

TEST(GptOptionsTest, PresetsHaveTheSizesThatPeopleKnow) {
  EXPECT_EQ(GptPreset("mini")->width, 128);
  EXPECT_EQ(GptPreset("mini")->vocabulary, 256);
  EXPECT_EQ(GptPreset("tiny")->layers, 2);
  EXPECT_EQ(GptPreset("gpt2")->vocabulary, 50257);
  EXPECT_EQ(GptPreset("gpt2")->width, 768);
  EXPECT_EQ(GptPreset("gpt3").status(),
            absl::InvalidArgumentError("gpt3 is not a preset; choose tiny, mini, gpt2"));
}

}  // namespace
}  // namespace evenkeel
