#include "absl/status/status.h"
#include "evenkeel/tools/gpu/cuda_bench.h"

namespace evenkeel::internal {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt() {
  return absl::UnimplementedError("this build is without a CUDA toolkit");
}

absl::StatusOr<std::unique_ptr<DeviceTimer>> MakeCudaTimer(DeviceRuntime&, StreamRef) {
  return CudaIfBuilt().status();
}

}  // namespace evenkeel::internal
