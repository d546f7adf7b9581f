#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/device/cuda_if_built.h"

namespace evenkeel {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt() { return &CudaDevices(); }

}  // namespace evenkeel
