// DeviceMath of CUDA's devices: cuBLAS's products and cuDNN's convolutions.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_CUDA_MATH_H_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_CUDA_MATH_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel::internal {

// Without cuDNN convolutions answer Unimplemented; without cuBLAS nothing works.
absl::StatusOr<std::unique_ptr<DeviceMath>> MakeCudaMath(DeviceRuntime& runtime, Device device);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_CUDA_MATH_H_
