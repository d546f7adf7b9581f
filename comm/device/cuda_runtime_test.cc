#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/comm/device/testing/runtime_cases.h"

namespace evenkeel {

DeviceRuntime* TestedRuntime() { return &CudaDevices(); }
void SkipOrFail(const absl::Status& /*why*/) { EK_SKIP_WITHOUT_GPUS(1); }

}  // namespace evenkeel
