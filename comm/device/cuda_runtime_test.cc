#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/device/runtime_cases.h"
#include "gtest/gtest.h"

namespace evenkeel {

DeviceRuntime* TestedRuntime() { return &CudaDevices(); }
void SkipOrFail(const absl::Status& why) { GTEST_SKIP() << "needs 1 CUDA device: " << why.message(); }

}  // namespace evenkeel
