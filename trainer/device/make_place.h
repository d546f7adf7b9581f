// A place for a model on a device, with what multiplies there.
//
//   EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(*comm.runtime(), comm.device()));
//
// Errors: Unimplemented, with what is missing, in a build without cuBLAS or cuDNN for CUDA's runtime; the libraries'
//         and the runtime's own.

#ifndef EVENKEEL_TRAINER_DEVICE_MAKE_PLACE_H_
#define EVENKEEL_TRAINER_DEVICE_MAKE_PLACE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/place.h"

namespace evenkeel {

// With a new stream.
absl::StatusOr<DevicePlace> MakeDevicePlace(DeviceRuntime& runtime, Device device);

// cuBLAS and cuDNN for CUDA's runtime, plain loops for simulated devices.
absl::StatusOr<std::unique_ptr<DeviceMath>> MakeDeviceMath(DeviceRuntime& runtime, Device device);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_MAKE_PLACE_H_
