#include "absl/status/status.h"
#include "evenkeel/comm/device/cuda_if_built.h"

namespace evenkeel {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt() {
  return absl::UnimplementedError("this build is without a CUDA toolkit");
}

}  // namespace evenkeel
