#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/trainer/device/cuda_parts.h"

namespace evenkeel::internal {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt() { return &CudaDevices(); }

}  // namespace evenkeel::internal
