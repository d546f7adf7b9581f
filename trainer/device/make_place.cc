#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/widening_convolutions.h"

namespace evenkeel {
namespace {

// cuBLAS's products and cuDNN's convolutions.
absl::StatusOr<std::unique_ptr<DeviceMath>> MakeCudaMath(DeviceRuntime& runtime, Device device) {
  EK_ASSIGN_OR_RETURN(auto products, internal::MakeCudaProducts(runtime, device));
  const auto make_convolutions = [&runtime,
                                  device]() -> absl::StatusOr<std::unique_ptr<ConvolutionLibrary>> {
    EK_ASSIGN_OR_RETURN(auto cudnn, internal::MakeCudaConvolutions(runtime, device));
    return std::make_unique<internal::WideningConvolutions>(runtime, device, std::move(cudnn));
  };
  return std::make_unique<DeviceMath>(std::move(products), make_convolutions);
}

// By the runtime's name.
std::map<std::string, MakeDeviceMath, std::less<>>& Makers() {
  static auto* const makers =
      new std::map<std::string, MakeDeviceMath, std::less<>>{{"cuda", &MakeCudaMath}};
  return *makers;
}

}  // namespace

void UseDeviceMath(absl::string_view runtime_name, MakeDeviceMath make) {
  Makers().emplace(runtime_name, make);
}

absl::StatusOr<DevicePlace> MakeDevicePlace(DeviceRuntime& runtime, Device device) {
  const auto maker = Makers().find(runtime.name());
  if (maker == Makers().end()) {
    return absl::UnimplementedError(absl::StrCat(
        "matrix products are not implemented for devices of the runtime ", runtime.name()));
  }
  DevicePlace place{.runtime = &runtime, .device = device};
  EK_ASSIGN_OR_RETURN(place.stream, runtime.CreateStream(device));
  EK_ASSIGN_OR_RETURN(place.math, maker->second(runtime, device));
  return place;
}

}  // namespace evenkeel
