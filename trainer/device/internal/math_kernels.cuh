// What cuBLASLt has no call for: a float32 bias on 16-bit sums.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

// data [rows, columns] with `stride` elements from row to row, += bias [columns]; bfloat16, or else float16.
EK_KERNEL(256, ek_add_bias)
(void* data, int is_bfloat16, int64_t rows, int64_t columns, int64_t stride, const float* bias) {
  using namespace evenkeel::kernel;  // NOLINT: kernels have C's names, and so lie in no namespace
  for (int64_t i = GlobalIndex(); i < rows * columns; i += GlobalThreads()) {
    const int64_t row = i / columns;
    const int64_t column = i - row * columns;
    const int64_t at = row * stride + column;
    if (is_bfloat16 != 0) {
      BFloat& value = static_cast<BFloat*>(data)[at];
      value = FromFloat<BFloat>(ToFloat(value) + bias[column]);
    } else {
      Half& value = static_cast<Half*>(data)[at];
      value = FromFloat<Half>(ToFloat(value) + bias[column]);
    }
  }
}

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_KERNELS_CUH_
