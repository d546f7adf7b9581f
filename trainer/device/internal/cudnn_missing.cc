#include "absl/status/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"

namespace evenkeel::internal {

absl::Status LoadCudnn() { return absl::UnimplementedError("this build is without cuDNN"); }

absl::StatusOr<std::unique_ptr<ConvolutionLibrary>> MakeCudaConvolutions(DeviceRuntime& /*runtime*/,
                                                                         Device /*device*/) {
  return LoadCudnn();
}

}  // namespace evenkeel::internal
