#include "evenkeel/trainer/device/internal/cuda_math.h"

#include <utility>

#include "absl/status/status.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/internal/cuda_parts.h"
#include "evenkeel/trainer/device/internal/math_checks.h"
#include "evenkeel/trainer/device/internal/widening_convolutions.h"

namespace evenkeel::internal {
namespace {

class CudaMath : public DeviceMath {
 public:
  CudaMath(DeviceRuntime& runtime, Device device, std::unique_ptr<CudaProducts> products)
      : runtime_(runtime), device_(device), products_(std::move(products)) {}

  absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right, const float* bias,
                       TypedPointer output, StreamRef stream) override {
    EK_RETURN_IF_ERROR(CheckProduct(shape, left.dtype, output.dtype));
    return products_->Product(shape, left, right, bias, output, stream);
  }
  absl::Status ConvolutionForward(const DeviceConvolution& shape, const void* images, const void* weight, void* output,
                                  StreamRef stream) override {
    EK_RETURN_IF_ERROR(CheckConvolution(shape));
    EK_RETURN_IF_ERROR(NeedConvolutions());
    return convolutions_->Forward(shape, images, weight, output, stream);
  }
  absl::Status ConvolutionBackwardImages(const DeviceConvolution& shape, const void* weight, const void* diff_output,
                                         void* diff_images, StreamRef stream) override {
    EK_RETURN_IF_ERROR(CheckConvolution(shape));
    EK_RETURN_IF_ERROR(NeedConvolutions());
    return convolutions_->BackwardImages(shape, weight, diff_output, diff_images, stream);
  }
  absl::Status ConvolutionBackwardWeight(const DeviceConvolution& shape, const void* images, const void* diff_output,
                                         float* diff_weight, bool add, StreamRef stream) override {
    EK_RETURN_IF_ERROR(CheckConvolution(shape));
    EK_RETURN_IF_ERROR(NeedConvolutions());
    return convolutions_->BackwardWeight(shape, images, diff_output, diff_weight, add, stream);
  }

 private:
  // Who multiplies only need not load cuDNN.
  absl::Status NeedConvolutions() {
    if (convolutions_ != nullptr) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(std::unique_ptr<CudaConvolutions> cudnn, MakeCudaConvolutions(runtime_, device_));
    convolutions_ = std::make_unique<WideningConvolutions>(runtime_, device_, std::move(cudnn));
    return absl::OkStatus();
  }

  DeviceRuntime& runtime_;
  const Device device_;
  const std::unique_ptr<CudaProducts> products_;
  std::unique_ptr<CudaConvolutions> convolutions_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMath>> MakeCudaMath(DeviceRuntime& runtime, Device device) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<CudaProducts> products, MakeCudaProducts(runtime, device));
  return std::make_unique<CudaMath>(runtime, device, std::move(products));
}

}  // namespace evenkeel::internal
