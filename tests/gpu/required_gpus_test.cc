// Fails unless this machine has the GPUs that --config=gpu promises, with the number of tests that
// need one.

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr absl::string_view kSelf = "//tests/gpu:required_gpus_test";

int OtherGpuTests() {
  std::ifstream list("tests/gpu/gpu_tests.txt");
  EXPECT_TRUE(list.is_open());
  int count = 0;
  for (std::string label; std::getline(list, label);) count += label != kSelf ? 1 : 0;
  return count;
}

TEST(RequiredGpusTest, ThisMachineHasThem) {
  const int tests = OtherGpuTests();
  ASSERT_GT(tests, 0);
  const char* const required = std::getenv("EVENKEEL_REQUIRE_GPU");
  int needed = 1;
  if (required != nullptr && !absl::SimpleAtoi(required, &needed)) needed = 1;
  const GpuVerdict verdict = JudgeGpus(needed);
  const std::string sentence =
      absl::StrCat(tests, " test targets need GPUs; this one ", verdict.sentence);
  if (verdict.answer == GpuAnswer::kFail) FAIL() << sentence;
  if (verdict.answer == GpuAnswer::kSkip) GTEST_SKIP() << sentence;
}

}  // namespace
}  // namespace evenkeel
