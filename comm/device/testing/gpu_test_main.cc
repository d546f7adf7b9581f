// main() of tests that run on a GPU with no word about it in their source: where there is none,
// each of them is replaced by one that says why it does not run, so that they are counted as
// skipped.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class WithoutGpu : public testing::Test {
 public:
  void TestBody() override { EK_SKIP_WITHOUT_GPUS(1); }
};

constexpr char kSuite[] = "WithoutGpu";

std::vector<std::string> NamesOfTests() {
  std::vector<std::string> names;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      names.push_back(absl::StrCat(suite.name(), ".", suite.GetTestInfo(j)->name()));
    }
  }
  return names;
}

void ReplaceTests() {
  for (const std::string& name : NamesOfTests()) {
    testing::RegisterTest(kSuite, name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          []() -> WithoutGpu* { return new WithoutGpu; });
  }
  testing::GTEST_FLAG(filter) = absl::StrCat(kSuite, ".*");
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  if (evenkeel::JudgeGpus(1).answer != evenkeel::GpuAnswer::kRun) evenkeel::ReplaceTests();
  return RUN_ALL_TESTS();
}
