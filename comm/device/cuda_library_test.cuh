// For cuda_library_test.cc: kernels that are compiled and looked for, never launched.

#ifndef EVENKEEL_COMM_DEVICE_CUDA_LIBRARY_TEST_CUH_
#define EVENKEEL_COMM_DEVICE_CUDA_LIBRARY_TEST_CUH_

#include "evenkeel/comm/device/kernel.h"

EK_KERNEL(256, ek_test_image_scale)(float* data, int64_t count, float factor) {
  using namespace evenkeel::kernel;
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) data[i] *= factor;
}

EK_KERNEL(256, ek_test_image_sum)(const evenkeel::kernel::BFloat* data, int64_t count, float* sum) {
  using namespace evenkeel::kernel;
  float own = 0;
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) own += ToFloat(data[i]);
  EK_SHARED float scratch[kWarp];
  const float all = BlockSum(own, scratch);
  if (ThreadX() == 0) AtomicAdd(sum, all);
}

#endif  // EVENKEEL_COMM_DEVICE_CUDA_LIBRARY_TEST_CUH_
