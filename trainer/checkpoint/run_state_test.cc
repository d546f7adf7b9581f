#include "evenkeel/trainer/checkpoint/run_state.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_replace.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

RunState SomeState() {
  RunState state{.steps = 412,
                 .at = {.epoch = 1, .step = 412, .samples = 6336},
                 .world_size = 2,
                 .plan_begin = {.epoch = 1, .step = 400, .samples = 6000},
                 .bucket_plan = std::string("\0\x7f\xff plan", 8)};
  state.trained = {{.predictions = 96, .correct = 50, .loss_sum = 0.1 + 0.2}, {.predictions = 0}};
  state.settings = {.fixed = {{"seed", "0"}, {"model", "mlp"}},
                    .dealing = {{"batch_size", "8"}},
                    .free = {{"lr", "0.1"}}};
  state.files["model.safetensors"] = {.bytes = 1000, .blocks = {7}};
  return state;
}

TEST(RunStateTest, IsReadAsItWasWritten) {
  const auto read = RunState::Parse(SomeState().Serialize());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->steps, 412);
  EXPECT_EQ(read->at, SomeState().at);
  EXPECT_EQ(read->plan_begin, SomeState().plan_begin);
  EXPECT_EQ(read->bucket_plan, SomeState().bucket_plan);
  ASSERT_THAT(read->trained, SizeIs(2));
  EXPECT_EQ(read->trained[0].loss_sum, 0.1 + 0.2);  // To the last bit.
  EXPECT_EQ(read->settings, SomeState().settings);
  EXPECT_EQ(read->files, SomeState().files);
  EXPECT_EQ(read->Serialize(), SomeState().Serialize());
}

TEST(RunStateTest, AnyOtherNumberIsFound) {
  const std::string good = SomeState().Serialize();
  for (const auto& [from, to] :
       {std::pair("412", "413"), std::pair("6336", "6337"), std::pair("mlp", "cnn"),
        std::pair("\"predictions\": 96", "\"predictions\": 97"), std::pair("007f", "017f")}) {
    const std::string text = absl::StrReplaceAll(good, {{from, to}});
    ASSERT_NE(text, good) << from;
    const absl::Status status = RunState::Parse(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is damaged"));
  }
  EXPECT_THAT(std::string(RunState::Parse("{}").status().message()),
              HasSubstr("not the state of a training run"));
}

// The JSON parser stops at a NUL, so that the checksum would not see what follows.
TEST(RunStateTest, AppendedBytesAreFound) {
  for (const std::string& more :
       {std::string(1, '\0'), std::string("\0more", 5), std::string("more")}) {
    const absl::Status status = RunState::Parse(SomeState().Serialize() + more).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is not JSON at line"));
  }
}

TEST(RunStateTest, NoBytesDoHarm) {
  Fuzz({SomeState().Serialize()}, Again<RunState>,
       {.rounds = 2000, .memory_per_byte = 400, .memory = 64 << 10, .is_canonical = false});
}

TEST(CompareSettingsTest, RefusesAnotherRunAndTellsWhatIsDifferent) {
  const RunSettings saved = SomeState().settings;
  auto terms = CompareSettings(saved, saved);
  ASSERT_TRUE(terms.ok());
  EXPECT_TRUE(terms->is_exact);
  EXPECT_THAT(terms->notes, SizeIs(0));

  RunSettings mine = saved;
  mine.free["lr"] = "0.05";
  terms = CompareSettings(saved, mine);
  ASSERT_TRUE(terms.ok());
  EXPECT_TRUE(terms->is_exact);
  EXPECT_THAT(terms->notes, testing::ElementsAre("lr is 0.05, in the checkpoint it was 0.1"));

  mine.dealing["batch_size"] = "4";
  terms = CompareSettings(saved, mine);
  ASSERT_TRUE(terms.ok());
  EXPECT_FALSE(terms->is_exact);
  EXPECT_EQ(terms->notes.back(), "the rest of the epoch is redistributed over the ranks");

  mine.fixed["seed"] = "1";
  const absl::Status refused = CompareSettings(saved, mine).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("seed is 0 in the checkpoint, but 1 in this run"));
}

TEST(CompareSettingsTest, LimitsOfRanksAreOfThoseRanks) {
  RunSettings saved = SomeState().settings;
  saved.dealing = {{"the number of ranks", "2"}, {"rank_steps", "3,5"}};
  RunSettings mine = saved;
  EXPECT_TRUE(CompareSettings(saved, mine).ok());
  mine.dealing["the number of ranks"] = "3";
  EXPECT_THAT(std::string(CompareSettings(saved, mine).status().message()),
              HasSubstr("--rank_steps or --stop_early"));
}

}  // namespace
}  // namespace evenkeel
