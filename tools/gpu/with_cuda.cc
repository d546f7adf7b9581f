#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/tools/gpu/open_device.h"

namespace evenkeel::internal {

absl::StatusOr<DeviceRuntime*> CudaOfThisBuild() { return &CudaDevices(); }

}  // namespace evenkeel::internal
