#include "evenkeel/trainer/app/freeze_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

ParameterSet TwoLayers() {
  static float memory[4];
  ParameterSet parameters;
  for (const char* name : {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}) {
    parameters.Add(name, absl::MakeSpan(memory + parameters.size(), 1));
  }
  return parameters;
}

std::string Trained(const ParameterSet& parameters) {
  std::string flags;
  for (int i = 0; i < parameters.size(); ++i) flags += parameters.trainable(i) ? 'x' : '-';
  return flags;
}

TEST(FreezeScheduleTest, ReadsRanges) {
  EXPECT_EQ(*ParseFreezeSchedule(""), FreezeSchedule{});
  const FreezeSchedule one = {{"fc1", 3, 5}};
  EXPECT_EQ(*ParseFreezeSchedule("fc1@3:5"), one);
  const FreezeSchedule two = {{"fc1", 3, 5}, {"fc2.bias", 0}};
  EXPECT_EQ(*ParseFreezeSchedule("fc1@3:5,fc2.bias@0:"), two);
}

TEST(FreezeScheduleTest, RefusesWhatIsMalformedAndQuotesIt) {
  for (const std::string text :
       {"fc1", "fc1@3", "fc1@:5", "fc1@a:b", "fc1@3:5x", "@3:5", "fc1@-1:5", "fc1@3:-5", "fc1@ 3:5",
        "fc1@+3:5", "fc1:3@5", "fc1@3:99999999999999999999"}) {
    const absl::Status status = ParseFreezeSchedule(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"" + text + "\""));
    EXPECT_FALSE(ParseFreezeSchedule("fc2@0:1," + text).ok()) << text;
  }
  EXPECT_FALSE(ParseFreezeSchedule("fc1@3:5,").ok());
  EXPECT_THAT(std::string(ParseFreezeSchedule("fc1@5:5").status().message()),
              HasSubstr("is empty"));
}

TEST(FreezeScheduleTest, NamesAPrefixWithoutParameter) {
  const ParameterSet parameters = TwoLayers();
  EXPECT_TRUE(CheckFreezeSchedule({{"fc1", 0, 1}, {"fc2.w", 0, 1}}, parameters).ok());
  const absl::Status status = CheckFreezeSchedule({{"fc1", 0, 1}, {"conv", 0, 1}}, parameters);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"conv\""));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("fc1.weight, fc1.bias, fc2.weight, fc2.bias"));
}

TEST(FreezeScheduleTest, FreezesAndUnfreezesByStep) {
  ParameterSet parameters = TwoLayers();
  const FreezeSchedule schedule = {{"fc1", 3, 5}, {"fc1.bias", 4, 6}};
  const std::vector<std::string> expected = {"xxxx", "xxxx", "xxxx", "--xx",
                                             "--xx", "x-xx", "xxxx"};
  for (size_t step = 0; step < expected.size(); ++step) {
    ApplyFreezeSchedule(schedule, step, parameters);
    EXPECT_EQ(Trained(parameters), expected[step]) << "step " << step;
  }
  ApplyFreezeSchedule(schedule, 4, parameters);  // Any step may follow any other one.
  EXPECT_EQ(Trained(parameters), "--xx");
}

TEST(FreezeScheduleTest, SaysWhatAStepHasFrozen) {
  const ParameterSet parameters = TwoLayers();
  const FreezeSchedule schedule = {{"fc1", 3, 5}, {"fc1.bias", 4, 6}};
  EXPECT_THAT(FrozenAt(schedule, 2, parameters), testing::IsEmpty());
  EXPECT_THAT(FrozenAt(schedule, 4, parameters), testing::ElementsAre(0, 1));
  EXPECT_THAT(FrozenAt(schedule, 5, parameters), testing::ElementsAre(1));
}

TEST(FreezeScheduleTest, LeavesWhatItDoesNotNameAlone) {
  ParameterSet parameters = TwoLayers();
  parameters.SetTrainable("fc2.bias", false);
  ApplyFreezeSchedule({{"fc1", 0, 1}}, 5, parameters);
  EXPECT_EQ(Trained(parameters), "xxx-");
}

TEST(FreezeScheduleTest, NoChangeIsNoNewMask) {
  ParameterSet parameters = TwoLayers();
  const FreezeSchedule schedule = {{"fc1", 3, 5}};
  ApplyFreezeSchedule(schedule, 3, parameters);
  const uint64_t version = parameters.mask_version();
  ApplyFreezeSchedule(schedule, 4, parameters);
  EXPECT_EQ(parameters.mask_version(), version);
}

}  // namespace
}  // namespace evenkeel
