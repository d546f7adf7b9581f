// Conversions missing in cuDNN: a float32 gradient of 16-bit weights, or one at any address.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_CONVOLUTION_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_CONVOLUTION_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/dtype.h"

namespace evenkeel::kernel {

EK_DEVICE float Widened(const void* from, DType type, int64_t i) {
  if (type == DType::kFloat32) return static_cast<const float*>(from)[i];
  return type == DType::kBFloat16 ? ToFloat(static_cast<const BFloat*>(from)[i])
                                  : ToFloat(static_cast<const Half*>(from)[i]);
}

}  // namespace evenkeel::kernel

// to [count] = from, or += it.
EK_KERNEL(256, ek_widen)
(const void* from, evenkeel::DType type, int64_t count, float* to, int add) {
  using namespace evenkeel::kernel;  // NOLINT: kernels have C's names, and so lie in no namespace
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) {
    const float value = Widened(from, type, i);
    to[i] = add != 0 ? to[i] + value : value;
  }
}

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_CONVOLUTION_KERNELS_CUH_
