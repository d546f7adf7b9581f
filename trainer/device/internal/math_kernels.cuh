// Additions that cuBLASLt has no call for: a float32 bias on 16-bit sums, or on sums of a shape
// that it does not support.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/dtype.h"

namespace evenkeel::kernel {

template <typename T>
EK_DEVICE void AddTo(T& value, float addend) {
  value = FromFloat<T>(ToFloat(value) + addend);
}

}  // namespace evenkeel::kernel

// data [rows, columns] with `stride` elements from row to row, += bias [columns].
EK_KERNEL(256, ek_add_bias)
(void* data, evenkeel::DType type, int64_t rows, int64_t columns, int64_t stride,
 const float* bias) {
  using namespace evenkeel::kernel;  // NOLINT: kernels have C's names, and so lie in no namespace
  using evenkeel::DType;
  for (int64_t i = GlobalIndex(); i < rows * columns; i += GlobalThreads()) {
    const int64_t row = i / columns;
    const int64_t column = i - row * columns;
    const int64_t at = row * stride + column;
    if (type == DType::kFloat32) AddTo(static_cast<float*>(data)[at], bias[column]);
    if (type == DType::kBFloat16) AddTo(static_cast<BFloat*>(data)[at], bias[column]);
    if (type == DType::kFloat16) AddTo(static_cast<Half*>(data)[at], bias[column]);
  }
}

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_KERNELS_CUH_
