#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/simulated_math.h"
#include "evenkeel/trainer/device/widening_convolutions.h"

namespace evenkeel {
namespace {

// cuBLAS's products and cuDNN's convolutions.
class CudaMath : public DeviceMath {
 public:
  CudaMath(DeviceRuntime& runtime, Device device, std::unique_ptr<internal::CudaProducts> products)
      : runtime_(runtime), device_(device), products_(std::move(products)) {}

 private:
  absl::Status DoProduct(const StridedShape& shape, TypedPointer left, const void* right,
                         const float* bias, TypedPointer output, StreamRef stream) override {
    return products_->Product(shape, left, right, bias, output, stream);
  }
  absl::Status DoConvolve(ConvolutionPass pass, const DeviceConvolution& shape,
                          const ConvolutionTensors& tensors, StreamRef stream) override {
    if (convolutions_ == nullptr) {  // Products alone do not load cuDNN.
      EK_ASSIGN_OR_RETURN(auto cudnn, internal::MakeCudaConvolutions(runtime_, device_));
      convolutions_ =
          std::make_unique<internal::WideningConvolutions>(runtime_, device_, std::move(cudnn));
    }
    return convolutions_->Convolve(pass, shape, tensors, stream);
  }

  DeviceRuntime& runtime_;
  const Device device_;
  const std::unique_ptr<internal::CudaProducts> products_;
  std::unique_ptr<internal::CudaConvolutions> convolutions_;
};

absl::StatusOr<std::unique_ptr<DeviceMath>> MakeDeviceMath(DeviceRuntime& runtime, Device device) {
  if (auto* const simulated = dynamic_cast<SimulatedDevices*>(&runtime)) {
    return std::make_unique<SimulatedMath>(*simulated);
  }
  if (runtime.name() != "cuda") {
    return absl::UnimplementedError(absl::StrCat(
        "matrix products are not implemented for devices of the runtime ", runtime.name()));
  }
  EK_ASSIGN_OR_RETURN(auto products, internal::MakeCudaProducts(runtime, device));
  return std::make_unique<CudaMath>(runtime, device, std::move(products));
}

}  // namespace

absl::StatusOr<DevicePlace> MakeDevicePlace(DeviceRuntime& runtime, Device device) {
  DevicePlace place{.runtime = &runtime, .device = device};
  EK_ASSIGN_OR_RETURN(place.stream, runtime.CreateStream(device));
  EK_ASSIGN_OR_RETURN(place.math, MakeDeviceMath(runtime, device));
  return place;
}

}  // namespace evenkeel
