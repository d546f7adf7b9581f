// CUDA's devices, as device/runtime.h wants them.
//
//   DeviceRuntime& cuda = CudaDevices();
//   // FailedPrecondition "no CUDA device: ..."
//   EK_ASSIGN_OR_RETURN(int devices, cuda.DeviceCount());
//   StreamRef mine{my_cuda_stream, Device::Cuda(0)};  // streams of your own work as well
//
// Kernels' images are loaded once per device, when their first kernel is launched there. Events are
// reused. Everything that is put on a stream may be captured into a CUDA graph, loading excepted:
// launch each kernel once before.
//
// Needs a toolkit to build, and a driver from 12.0 on to run.

#ifndef EVENKEEL_COMM_DEVICE_CUDA_H_
#define EVENKEEL_COMM_DEVICE_CUDA_H_

#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

// Returns the runtime of this process, which is never destroyed.
DeviceRuntime& CudaDevices();

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_CUDA_H_
