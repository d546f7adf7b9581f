// Products of matrices and convolutions on a device: cuBLAS and cuDNN there, plain loops on simulated ones.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMath> math, MakeDeviceMath(runtime, device));  // make_place.h
//   EK_RETURN_IF_ERROR(math->Product(shape, {DType::kBFloat16, x}, weight, bias, {DType::kFloat32, output}, stream));
//
// Shapes:    strided_shape.h says what a product's are; one of a factor's two inner strides (row, column) is 1, and the
//            output's column stride is. Images are [batch, channels, side, side], weights [outputs, inputs, k, k].
// Types:     factors float32, bfloat16 or float16, both the same; the output that type or float32. Sums are in float32.
//            cuDNN rounds the weight gradient of 16-bit images to their type before it becomes float32.
// Order:     everything runs on `stream`, and is captured with it into a graph.
// Threads:   thread-compatible.
// Errors:    what the library answers, with the call and the shape; Unimplemented for shapes it has no algorithm for.

#ifndef EVENKEEL_TRAINER_DEVICE_MATH_H_
#define EVENKEEL_TRAINER_DEVICE_MATH_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

struct TypedPointer {
  DType dtype = DType::kFloat32;
  void* data = nullptr;
};

// Padded by (kernel - 1) / 2 with zeros.
struct DeviceConvolution {
  DType dtype = DType::kFloat32;  // Of images and weights; weight gradients are float32.
  int64_t batch = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  int64_t side = 0;
  int64_t kernel = 3;
  int64_t stride = 1;
  friend bool operator==(const DeviceConvolution&, const DeviceConvolution&) = default;
};

class DeviceMath {
 public:
  virtual ~DeviceMath() = default;

  // output = left * right, plus `bias` (float32 [columns]) if it is not null, plus what lies there if shape.add.
  virtual absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right, const float* bias,
                               TypedPointer output, StreamRef stream) = 0;

  virtual absl::Status ConvolutionForward(const DeviceConvolution& shape, const void* images, const void* weight,
                                          void* output, StreamRef stream) = 0;
  virtual absl::Status ConvolutionBackwardImages(const DeviceConvolution& shape, const void* weight,
                                                 const void* diff_output, void* diff_images, StreamRef stream) = 0;
  // Added to what lies there if `add`.
  virtual absl::Status ConvolutionBackwardWeight(const DeviceConvolution& shape, const void* images,
                                                 const void* diff_output, float* diff_weight, bool add,
                                                 StreamRef stream) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_MATH_H_
