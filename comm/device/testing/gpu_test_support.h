// The first line of a test that needs GPUs:
//
//   TEST(NcclTest, Averages) {
//     EK_SKIP_WITHOUT_GPUS(2);       // "needs 2 CUDA devices, there are 0: no CUDA device: ..."
//
// Skips the test if there are too few. Bazel counts that as passed, so GPU runners set the number
// of GPUs that they must have, and the test fails there with the same sentence:
//
//   # --config=gpu alone requires 1
//   bazel test --config=gpu --test_env=EVENKEEL_REQUIRE_GPU=2 //...
//
// A test that needs more skips there as well; one that finds enough runs. Its target has the tags
// "gpu" and "exclusive", and tests/gpu/gpu_tests.txt names it.

#ifndef EVENKEEL_COMM_DEVICE_TESTING_GPU_TEST_SUPPORT_H_
#define EVENKEEL_COMM_DEVICE_TESTING_GPU_TEST_SUPPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"  // IWYU pragma: keep, for the macro

namespace evenkeel {

// Returns the number of CUDA devices of this process, or the reason for none.
absl::StatusOr<int> GpusForTest();

enum class GpuAnswer { kRun, kSkip, kFail };

struct GpuVerdict {
  GpuAnswer answer = GpuAnswer::kRun;
  std::string sentence;  // Empty for kRun.
};

// `required`: the value of EVENKEEL_REQUIRE_GPU; empty: none is required.
GpuVerdict JudgeGpus(int needed, const absl::StatusOr<int>& devices, absl::string_view required);
// Returns the result for this machine.
GpuVerdict JudgeGpus(int needed);

}  // namespace evenkeel

// In the body of a test, or in SetUp().
#define EK_SKIP_WITHOUT_GPUS(needed)                                                            \
  do {                                                                                          \
    const ::evenkeel::GpuVerdict ek_verdict = ::evenkeel::JudgeGpus(needed);                    \
    if (ek_verdict.answer == ::evenkeel::GpuAnswer::kFail) FAIL() << ek_verdict.sentence;       \
    if (ek_verdict.answer == ::evenkeel::GpuAnswer::kSkip) GTEST_SKIP() << ek_verdict.sentence; \
  } while (false)

#endif  // EVENKEEL_COMM_DEVICE_TESTING_GPU_TEST_SUPPORT_H_
