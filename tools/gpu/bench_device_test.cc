// Runs the program as people run it; on simulated devices, so that it keeps working where there is
// none.

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tools/gpu/testing/run_command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(BenchDeviceTest, MeasuresEachCaseBesideACopy) {
  const CommandResult result =
      RunCommand("tools/gpu/bench_device --device=simulated --largest_mib=1 --rows");
  ASSERT_EQ(result.exit_code, 0) << result.error;
  std::vector<std::string> names;
  for (const absl::string_view line : absl::StrSplit(result.out, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> columns = absl::StrSplit(line, '\t');
    ASSERT_EQ(columns.size(), 4u) << line;
    names.push_back(columns[0]);
    EXPECT_EQ(columns[1], "shown") << "nothing of a simulated device is a result";
    EXPECT_THAT(columns[2], HasSubstr(" of a copy; "));
    EXPECT_EQ(columns[3], "");
  }
  EXPECT_THAT(names, ElementsAre("pack float32, 1 MiB", "unpack float32, 1 MiB",
                                 "pack bfloat16, 1 MiB", "unpack bfloat16, 1 MiB",
                                 "AdamW bfloat16, 1 MiB", "AdamW float32, 1 MiB"));
}

TEST(BenchDeviceTest, TellsItsDevices) {
  const CommandResult result = RunCommand("tools/gpu/bench_device --device=simulated --devices");
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.out, HasSubstr("0, "));
}

TEST(BenchDeviceTest, RefusesWhatItDoesNotKnow) {
  const CommandResult result = RunCommand("tools/gpu/bench_device --device=gpu");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error, "bench_device: --device='gpu' is neither cuda nor simulated\n");
  EXPECT_THAT(RunCommand("tools/gpu/bench_device fast").error, HasSubstr("\"fast\" is not a flag"));
}

}  // namespace
}  // namespace evenkeel
