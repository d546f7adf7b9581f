#include "absl/status/statusor.h"
#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/device/devices_of_tests.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel::internal {

absl::StatusOr<int> DevicesOfTests() { return CudaDevices().DeviceCount(); }

}  // namespace evenkeel::internal
