// CUDA's devices, for programs that are also built without a CUDA toolkit.
//
//   EK_ASSIGN_OR_RETURN(DeviceRuntime* const cuda, CudaIfBuilt());
//
// Errors: Unimplemented in a build without a toolkit.

#ifndef EVENKEEL_COMM_DEVICE_CUDA_IF_BUILT_H_
#define EVENKEEL_COMM_DEVICE_CUDA_IF_BUILT_H_

#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt();

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_CUDA_IF_BUILT_H_
