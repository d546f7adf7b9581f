#include "absl/status/status.h"
#include "evenkeel/tools/gpu/open_device.h"

namespace evenkeel::internal {

absl::StatusOr<DeviceRuntime*> CudaOfThisBuild() {
  return absl::UnimplementedError("this build is without a CUDA toolkit");
}

}  // namespace evenkeel::internal
