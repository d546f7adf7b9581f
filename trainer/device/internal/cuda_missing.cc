#include "absl/status/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"

namespace evenkeel::internal {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt() {
  return absl::UnimplementedError("this build is without CUDA");
}

}  // namespace evenkeel::internal
