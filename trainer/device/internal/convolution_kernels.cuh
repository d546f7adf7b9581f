// What cuDNN has no call for: a float32 gradient of 16-bit weights.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_CONVOLUTION_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_CONVOLUTION_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

// to [count] = from, or += it; from is bfloat16, or else float16.
EK_KERNEL(256, ek_widen)(const void* from, int is_bfloat16, int64_t count, float* to, int add) {
  using namespace evenkeel::kernel;  // NOLINT: kernels have C's names, and so lie in no namespace
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) {
    const float value =
        is_bfloat16 != 0 ? ToFloat(static_cast<const BFloat*>(from)[i]) : ToFloat(static_cast<const Half*>(from)[i]);
    to[i] = add != 0 ? to[i] + value : value;
  }
}

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_CONVOLUTION_KERNELS_CUH_
