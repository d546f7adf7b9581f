#include "evenkeel/comm/device/testing/gpu_test_support.h"

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(JudgeGpusTest, RunsWhereThereAreEnough) {
  EXPECT_EQ(JudgeGpus(1, 1, "").answer, GpuAnswer::kRun);
  EXPECT_EQ(JudgeGpus(2, 4, "1").answer, GpuAnswer::kRun);
  EXPECT_EQ(JudgeGpus(1, 1, "2").answer, GpuAnswer::kRun)
      << "what can run tells more than a second failure";
}

TEST(JudgeGpusTest, SkipsWithTheReason) {
  const GpuVerdict none =
      JudgeGpus(2, absl::FailedPreconditionError("no CUDA device: no driver"), "");
  EXPECT_EQ(none.answer, GpuAnswer::kSkip);
  EXPECT_EQ(none.sentence, "needs 2 CUDA devices, there are 0: no CUDA device: no driver");
  EXPECT_EQ(JudgeGpus(2, 1, "").sentence, "needs 2 CUDA devices, there is 1");
  EXPECT_EQ(JudgeGpus(1, 0, "").sentence, "needs 1 CUDA device, there are 0");
  EXPECT_EQ(JudgeGpus(2, 1, "1").answer, GpuAnswer::kSkip) << "more than this machine promised";
}

TEST(JudgeGpusTest, FailsWhereTheMachineBrokeItsPromise) {
  const GpuVerdict none =
      JudgeGpus(1, absl::FailedPreconditionError("no CUDA device: no driver"), "2");
  EXPECT_EQ(none.answer, GpuAnswer::kFail);
  EXPECT_EQ(none.sentence,
            "needs 1 CUDA device, there are 0: no CUDA device: no driver; EVENKEEL_REQUIRE_GPU=2, "
            "so this machine must "
            "have 2 CUDA devices");
  EXPECT_EQ(JudgeGpus(2, 1, "2").answer, GpuAnswer::kFail);
}

TEST(JudgeGpusTest, RefusesWhatIsNoNumber) {
  for (const char* required : {"0", "-1", "all", "1x"}) {
    EXPECT_EQ(JudgeGpus(1, 8, required).answer, GpuAnswer::kFail) << required;
  }
  EXPECT_EQ(JudgeGpus(1, 8, "all").sentence,
            "EVENKEEL_REQUIRE_GPU='all' is not a number of at least 1");
}

}  // namespace
}  // namespace evenkeel
