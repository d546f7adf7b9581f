// CUDA's side of device_timer.h, in builds with a toolkit and without.

#ifndef EVENKEEL_TOOLS_GPU_CUDA_BENCH_H_
#define EVENKEEL_TOOLS_GPU_CUDA_BENCH_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/tools/gpu/device_timer.h"

namespace evenkeel::internal {

absl::StatusOr<DeviceRuntime*> CudaIfBuilt();
absl::StatusOr<std::unique_ptr<DeviceTimer>> MakeCudaTimer(DeviceRuntime& runtime,
                                                           StreamRef stream);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TOOLS_GPU_CUDA_BENCH_H_
