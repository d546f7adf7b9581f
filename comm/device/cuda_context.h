// CUDA's contexts, through its driver: whose calls on a thread go to which device.
//
//   const ScopedCudaDevice scope(Device::Cuda(2));
//   EK_RETURN_IF_ERROR(scope.status());
//   ... the runtime's, NCCL's and other libraries' calls on this thread are that device's ...
//
// The driver is taken when a device is first used, so programs start without one.
//
// Threads: thread-safe; a scope ends on its thread.
// Errors:  FailedPrecondition "no CUDA device: ..." without a driver, or with one that lacks
//          functions.

#ifndef EVENKEEL_COMM_DEVICE_CUDA_CONTEXT_H_
#define EVENKEEL_COMM_DEVICE_CUDA_CONTEXT_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/shared_library.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

#define EK_CUDA_DRIVER_FUNCTIONS(X) \
  X(cuCtxGetCurrent)                \
  X(cuCtxPopCurrent)                \
  X(cuCtxPushCurrent)               \
  X(cuDeviceGet)                    \
  X(cuDevicePrimaryCtxRetain)       \
  X(cuGetErrorString)               \
  X(cuInit)                         \
  X(cuLaunchKernel)                 \
  X(cuModuleGetFunction)            \
  X(cuModuleLoadData)

// The functions of libcuda that are used.
struct CudaDriver {
  EK_CUDA_DRIVER_FUNCTIONS(EK_DECLARE_FUNCTION)
  CUresult (*cuFuncLoad)(CUfunction) = nullptr;  // Null before CUDA 12.4.
  absl::Status status;

  absl::Status Check(absl::string_view what, CUresult result) const;
};
const CudaDriver& TheDriver();

// One that is in use already, so that nothing is taken up on another device for nothing; the first
// if none is.
Device CudaDeviceInUse();

// Makes the device's context the calling thread's for a scope, then the one it had, be that none:
// asking the runtime for the thread's device, and setting it back, would take up memory on device 0
// for threads that never chose one.
class ScopedCudaDevice {
 public:
  explicit ScopedCudaDevice(Device device);
  ~ScopedCudaDevice();
  ScopedCudaDevice(const ScopedCudaDevice&) = delete;
  ScopedCudaDevice& operator=(const ScopedCudaDevice&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  bool is_pushed_ = false;
  absl::Status status_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_DEVICE_CUDA_CONTEXT_H_
