#include "evenkeel/trainer/device/math.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// One stride leads from matrix to matrix.
bool IsEven(const StridedShape& s) {
  const auto is_even = [&](const MatrixStrides& m) { return m.outer == s.heads * m.head; };
  return s.outer == 1 || s.heads == 1 || (is_even(s.left) && is_even(s.right) && is_even(s.output));
}

}  // namespace

std::string ToString(const DeviceConvolution& s) {
  return absl::StrCat("convolution of ", ToString(s.dtype), ", ", s.batch, " images, ", s.inputs,
                      " to ", s.outputs, " channels, side ", s.side, ", kernel ", s.kernel,
                      ", stride ", s.stride);
}

absl::Status DeviceMath::Product(const StridedShape& s, TypedPointer left, const void* right,
                                 const float* bias, TypedPointer output, StreamRef stream) {
  if (IsFactorType(left.dtype) && (output.dtype == left.dtype || output.dtype == DType::kFloat32) &&
      IsEven(s) && (s.left.row == 1 || s.left.column == 1) &&
      (s.right.row == 1 || s.right.column == 1) && s.output.column == 1) {
    return products_->Product(s, left, right, bias, output, stream);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "product: ", ToString(left.dtype), " to ", ToString(output.dtype),
      " with strides of row and column ", s.left.row, ",", s.left.column, " times ", s.right.row,
      ",", s.right.column, " to ", s.output.row, ",", s.output.column, "; of outer and head in ",
      s.outer, " x ", s.heads, " matrices ", s.left.outer, ",", s.left.head, " times ",
      s.right.outer, ",", s.right.head, " to ", s.output.outer, ",", s.output.head));
}

absl::Status DeviceMath::Convolve(ConvolutionPass pass, const DeviceConvolution& s,
                                  const ConvolutionTensors& tensors, StreamRef stream) {
  if (!IsFactorType(s.dtype) || s.batch <= 0 || s.inputs <= 0 || s.outputs <= 0 || s.side <= 0 ||
      s.kernel % 2 != 1 || s.stride <= 0) {
    return absl::InvalidArgumentError(ToString(s));
  }
  if (convolutions_ == nullptr) {
    EK_ASSIGN_OR_RETURN(convolutions_, make_convolutions_());
  }
  return convolutions_->Convolve(pass, s, tensors, stream);
}

}  // namespace evenkeel
