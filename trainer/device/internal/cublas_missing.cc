#include "absl/status/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"

namespace evenkeel::internal {

absl::Status LoadCublas() { return absl::UnimplementedError("this build is without cuBLAS"); }

absl::StatusOr<std::unique_ptr<ProductLibrary>> MakeCudaProducts(DeviceRuntime& /*runtime*/,
                                                                 Device /*device*/) {
  return LoadCublas();
}

}  // namespace evenkeel::internal
