#include "evenkeel/trainer/device/make_place.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/internal/cuda_math.h"
#include "evenkeel/trainer/device/simulated_math.h"

namespace evenkeel {

absl::StatusOr<DevicePlace> MakeDevicePlace(DeviceRuntime& runtime, Device device) {
  DevicePlace place{.runtime = &runtime, .device = device};
  EK_ASSIGN_OR_RETURN(place.stream, runtime.CreateStream(device));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMath> math, MakeDeviceMath(runtime, device));
  place.math = std::move(math);
  return place;
}

absl::StatusOr<std::unique_ptr<DeviceMath>> MakeDeviceMath(DeviceRuntime& runtime, Device device) {
  if (auto* const simulated = dynamic_cast<SimulatedDevices*>(&runtime)) {
    return std::make_unique<SimulatedMath>(*simulated);
  }
  if (runtime.name() == "cuda") return internal::MakeCudaMath(runtime, device);
  return absl::UnimplementedError(absl::StrCat("no products of matrices on devices of the runtime ", runtime.name()));
}

}  // namespace evenkeel
