// Products of matrices and convolutions on a device, by the libraries of its runtime: cuBLAS and
// cuDNN for CUDA's.
//
//   // device_models.h
//   EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(runtime, device));
//   EK_RETURN_IF_ERROR(place.math->Product(shape, {DType::kBFloat16, x}, weight, bias,
//                                          {DType::kFloat32, output}, stream));
//
// Shapes:    strided_shape.h says what a product's are; one of a factor's two inner strides (row,
//            column) is 1, and the output's column stride is. The matrices of a batch are evenly
//            spaced: where `outer` and `heads` are above 1, each outer stride is `heads` times the
//            head stride. Images are [batch, channels, side, side], weights [outputs, inputs, k,
//            k].
// Types:     factors float32, bfloat16 or float16, both the same; the output that type or float32.
//            Sums are in float32. cuDNN rounds the weight gradient of 16-bit images to their type
//            before it becomes float32.
// Order:     everything runs on `stream`, and is captured with it into a graph.
// Threads:   thread-compatible.
// Errors:    InvalidArgument with types and strides for what is not allowed here, before a library
//            could read beyond its arguments' memory; what the library answers, with the call and
//            the shape; Unimplemented for shapes it has no algorithm for.

#ifndef EVENKEEL_TRAINER_DEVICE_MATH_H_
#define EVENKEEL_TRAINER_DEVICE_MATH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

// Returns whether products and convolutions take factors of this type.
constexpr bool IsFactorType(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

struct TypedPointer {
  DType dtype = DType::kFloat32;
  void* data = nullptr;
};

// Padded by (kernel - 1) / 2 with zeros.
struct DeviceConvolution {
  DType dtype = DType::kFloat32;  // The type of images and weights; weight gradients are float32.
  int64_t batch = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  int64_t side = 0;
  int64_t kernel = 3;
  int64_t stride = 1;

  int64_t out_side() const { return (side - 1) / stride + 1; }
  // Elements of images, weight and output.
  std::array<int64_t, 3> counts() const {
    return {batch * inputs * side * side, outputs * inputs * kernel * kernel,
            batch * outputs * out_side() * out_side()};
  }
  friend bool operator==(const DeviceConvolution&, const DeviceConvolution&) = default;
};
std::string ToString(const DeviceConvolution& shape);

// Each pass computes one of a convolution's tensors, or its gradient, from the other two.
enum class ConvolutionPass : uint8_t { kBackwardImages, kBackwardWeight, kForward };

struct ConvolutionTensors {
  std::array<const void*, 3> data = {};  // Images, weight, output: pass i writes tensor i.
  bool add = false;                      // The weight's gradient is added to what lies there.

  const void* images() const { return data[0]; }
  const void* weight() const { return data[1]; }
  const void* output() const { return data[2]; }
  void* written(ConvolutionPass pass) const {
    return const_cast<void*>(data[static_cast<size_t>(pass)]);
  }
};

// The products of a runtime's devices. The arguments have been checked.
class ProductLibrary {
 public:
  virtual ~ProductLibrary() = default;
  virtual absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right,
                               const float* bias, TypedPointer output, StreamRef stream) = 0;
};

// The convolutions, likewise.
class ConvolutionLibrary {
 public:
  virtual ~ConvolutionLibrary() = default;
  virtual absl::Status Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                                const ConvolutionTensors& tensors, StreamRef stream) = 0;
};

class DeviceMath {
 public:
  using MakeConvolutions = std::function<absl::StatusOr<std::unique_ptr<ConvolutionLibrary>>()>;

  // The convolutions are made in the first Convolve(): products alone do not load their library.
  DeviceMath(std::unique_ptr<ProductLibrary> products, MakeConvolutions make_convolutions)
      : products_(std::move(products)), make_convolutions_(std::move(make_convolutions)) {}

  // output = left * right, plus `bias` (float32 [columns]) if it is not null, plus what lies there
  // if shape.add.
  absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right,
                       const float* bias, TypedPointer output, StreamRef stream);

  absl::Status Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                        const ConvolutionTensors& tensors, StreamRef stream);

 private:
  const std::unique_ptr<ProductLibrary> products_;
  const MakeConvolutions make_convolutions_;
  std::unique_ptr<ConvolutionLibrary> convolutions_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_MATH_H_
