// The optional parts of CUDA in a build: cuBLAS for products, cuDNN for convolutions.
// Each is present or returns Unimplemented; the BUILD file chooses.

#ifndef EVENKEEL_TRAINER_DEVICE_CUDA_PARTS_H_
#define EVENKEEL_TRAINER_DEVICE_CUDA_PARTS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel::internal {

// Load the library at the first call. Unimplemented in a build without cuBLAS, or cuDNN;
// FailedPrecondition if the library cannot be loaded. cuDNN loads cuBLAS by its name alone, so
// LoadCublas() comes first: it finds cuBLAS in more folders.
absl::Status LoadCublas();
absl::StatusOr<std::unique_ptr<ProductLibrary>> MakeCudaProducts(DeviceRuntime& runtime,
                                                                 Device device);
absl::Status LoadCudnn();
absl::StatusOr<std::unique_ptr<ConvolutionLibrary>> MakeCudaConvolutions(DeviceRuntime& runtime,
                                                                         Device device);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TRAINER_DEVICE_CUDA_PARTS_H_
