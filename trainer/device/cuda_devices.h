// The GPUs of this machine, in builds with CUDA and in those without.
//
//   // FailedPrecondition "no CUDA device: ...", Unimplemented
//   absl::StatusOr<int> devices = CountCudaDevices(CudaUse::kProducts);
//
// A separate process counts them: CUDA may not be used in a process that forks later.
//
// Errors: FailedPrecondition without a device; NotFound if there are devices, but a library that
//         is needed cannot be loaded; Unimplemented in a build without CUDA; DeadlineExceeded if
//         the driver does not respond.

#ifndef EVENKEEL_TRAINER_DEVICE_CUDA_DEVICES_H_
#define EVENKEEL_TRAINER_DEVICE_CUDA_DEVICES_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

// The libraries that a model needs: cuBLAS, or cuDNN as well.
enum class CudaUse { kProducts, kProductsAndConvolutions };

absl::StatusOr<int> CountCudaDevices(CudaUse use, absl::Duration timeout = absl::Minutes(1));

// Returns the facts of a device. Uses CUDA in this process, which must not fork later.
absl::StatusOr<DeviceFacts> FactsOfCudaDevice(int index);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_CUDA_DEVICES_H_
