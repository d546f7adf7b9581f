#include "evenkeel/trainer/device/internal/math_checks.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::internal {
namespace {

bool IsFactor(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

}  // namespace

absl::Status CheckProduct(const StridedShape& s, DType factors, DType output) {
  const bool fits = IsFactor(factors) && (output == factors || output == DType::kFloat32) &&
                    (s.left.row == 1 || s.left.column == 1) && (s.right.row == 1 || s.right.column == 1) &&
                    s.output.column == 1;
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "product: ", ToString(factors), " to ", ToString(output), " with strides of row and column ", s.left.row, ",",
      s.left.column, " times ", s.right.row, ",", s.right.column, " to ", s.output.row, ",", s.output.column));
}

absl::Status CheckConvolution(const DeviceConvolution& s) {
  if (IsFactor(s.dtype) && s.batch > 0 && s.inputs > 0 && s.outputs > 0 && s.side > 0 && s.kernel % 2 == 1 &&
      s.stride > 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("convolution of ", ToString(s.dtype), ": ", s.batch, " images, ",
                                                 s.inputs, " to ", s.outputs, " channels, side ", s.side, ", kernel ",
                                                 s.kernel, ", stride ", s.stride));
}

}  // namespace evenkeel::internal
