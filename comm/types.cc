#include "evenkeel/comm/types.h"

#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/float16.h"
#include "evenkeel/comm/base/names.h"

namespace evenkeel {

namespace {

constexpr absl::string_view kDTypeNames[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                             "uint8",   "int16",   "int32",   "int64"};
static_assert(std::size(kDTypeNames) == std::size(kAllDTypes));

constexpr absl::string_view kReduceOpNames[] = {"sum",     "average", "min",     "max",
                                                "product", "bit_or",  "bit_and", "bit_xor"};
static_assert(std::size(kReduceOpNames) == std::size(kAllReduceOps));

}  // namespace

absl::string_view ToString(DType dtype) {
  return internal::NameIn(kDTypeNames, dtype, "unknown dtype");
}

absl::StatusOr<DType> DTypeFromString(absl::string_view name) {
  if (const auto dtype = internal::ValueIn<DType>(kDTypeNames, name)) return *dtype;
  return absl::InvalidArgumentError(
      absl::StrCat("unknown dtype \"", name, "\"; known are ", absl::StrJoin(kDTypeNames, ", ")));
}

Float16::Float16(float value) : bits(internal::Float16FromFloat(value)) {}
Float16::operator float() const { return internal::FloatFromFloat16(bits); }
BFloat16::BFloat16(float value) : bits(internal::BFloat16FromFloat(value)) {}
BFloat16::operator float() const { return internal::FloatFromBFloat16(bits); }

std::string ToString(Device device) {
  return device.is_cpu() ? "cpu" : absl::StrCat("cuda:", device.index);
}

absl::string_view ToString(ReduceOp op) {
  return internal::NameIn(kReduceOpNames, op, "unknown reduction");
}

std::string ToString(const TensorView& view) {
  std::string text = absl::StrCat(ToString(view.dtype), "[", view.count, "]");
  if (!view.device.is_cpu()) absl::StrAppend(&text, " on ", ToString(view.device));
  return text;
}

}  // namespace evenkeel
