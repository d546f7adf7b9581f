#include "evenkeel/comm/types.h"

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/internal/float16.h"

namespace evenkeel {

absl::string_view ToString(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt8:
      return "int8";
    case DType::kUint8:
      return "uint8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown dtype";
}

absl::StatusOr<DType> DTypeFromString(absl::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (ToString(dtype) == name) return dtype;
  }
  auto append_name = [](std::string* out, DType dtype) { absl::StrAppend(out, ToString(dtype)); };
  return absl::InvalidArgumentError(
      absl::StrCat("unknown dtype \"", name, "\"; known are ", absl::StrJoin(kAllDTypes, ", ", append_name)));
}

Float16::Float16(float value) : bits(internal::Float16FromFloat(value)) {}
Float16::operator float() const { return internal::FloatFromFloat16(bits); }
BFloat16::BFloat16(float value) : bits(internal::BFloat16FromFloat(value)) {}
BFloat16::operator float() const { return internal::FloatFromBFloat16(bits); }

std::string ToString(Device device) {
  switch (device.kind) {
    case Device::Kind::kCpu:
      return "cpu";
    case Device::Kind::kCuda:
      return absl::StrCat("cuda:", device.index);
  }
  return "unknown device";
}

absl::string_view ToString(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kBitOr:
      return "bit_or";
  }
  return "unknown reduction";
}

std::string ToString(const TensorView& view) {
  std::string text = absl::StrCat(ToString(view.dtype), "[", view.count, "]");
  if (!view.device.is_cpu()) absl::StrAppend(&text, " on ", ToString(view.device));
  return text;
}

}  // namespace evenkeel
