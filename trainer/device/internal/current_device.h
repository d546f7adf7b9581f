// Makes a device the calling thread's current one for a while: cuBLAS and cuDNN work on that.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_CURRENT_DEVICE_H_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_CURRENT_DEVICE_H_

#include <cuda_runtime.h>

#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

class CurrentDevice {
 public:
  explicit CurrentDevice(Device device) {
    has_before_ = cudaGetDevice(&before_) == cudaSuccess;
    if (!has_before_ || before_ != device.index) (void)cudaSetDevice(device.index);
  }
  ~CurrentDevice() {
    if (has_before_) (void)cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool has_before_ = false;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_CURRENT_DEVICE_H_
