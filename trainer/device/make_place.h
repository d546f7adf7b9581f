// A place for a model on a device, with what multiplies there: cuBLAS and cuDNN for CUDA's runtime,
// plain loops for simulated devices.
//
//   EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(*comm.runtime(), comm.device()));
//
// Errors: Unimplemented, with what is missing, in a build without cuBLAS for CUDA's runtime, and
//         for convolutions in one without cuDNN; the libraries' and the runtime's own.

#ifndef EVENKEEL_TRAINER_DEVICE_MAKE_PLACE_H_
#define EVENKEEL_TRAINER_DEVICE_MAKE_PLACE_H_

#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

// With a new stream.
absl::StatusOr<DevicePlace> MakeDevicePlace(DeviceRuntime& runtime, Device device);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_MAKE_PLACE_H_
