// Adds 16-bit gradients to wide ones: what mixed precision accumulates on a device.

#ifndef EVENKEEL_BUCKET_REDUCER_ACCUMULATE_KERNELS_CUH_
#define EVENKEEL_BUCKET_REDUCER_ACCUMULATE_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

namespace evenkeel {
namespace kernel {

template <typename To, typename From>
EK_DEVICE void AccumulateHalves(void* to, const void* from, int64_t count, double scale) {
  auto* const sums = static_cast<To*>(to);
  const auto* const addends = static_cast<const From*>(from);
  const To factor = static_cast<To>(scale);
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) {
    sums[i] += static_cast<To>(ToFloat(addends[i])) * factor;
  }
}

}  // namespace kernel

// to[i] += from[i] * scale: float64 or float32, and float16 or bfloat16.
EK_KERNEL(256, ek_accumulate_halves)
(void* to, bool to_is_double, const void* from, bool from_is_float16, int64_t count, double scale) {
  if (to_is_double) {
    if (from_is_float16)
      return kernel::AccumulateHalves<double, kernel::Half>(to, from, count, scale);
    return kernel::AccumulateHalves<double, kernel::BFloat>(to, from, count, scale);
  }
  if (from_is_float16) return kernel::AccumulateHalves<float, kernel::Half>(to, from, count, scale);
  kernel::AccumulateHalves<float, kernel::BFloat>(to, from, count, scale);
}

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_ACCUMULATE_KERNELS_CUH_
