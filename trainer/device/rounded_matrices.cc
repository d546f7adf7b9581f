#include "evenkeel/trainer/device/rounded_matrices.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

absl::Status CheckFactorType(absl::string_view model, DType dtype) {
  if (IsFactorType(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      model, ": on a device the model computes in float32, bfloat16 or float16, not in ",
      ToString(dtype)));
}

absl::Status RoundedMatrices::Init(DeviceWork& work, const Model& model, DType dtype, int table) {
  const ParameterSet& parameters = model.parameters();
  std::vector<CopySegment> segments;
  std::vector<int> indices;
  int64_t bytes = 0;
  for (int i = 0; i < parameters.size(); ++i) {
    const TensorView& value = parameters[i].value;
    matrices_.push_back(value.data);
    if (value.dtype == dtype || model.shape(i).size() < 2 || i == table) continue;
    segments.push_back(
        {.to = TensorView(nullptr, value.count, dtype, value.device), .from = value});
    indices.push_back(i);
    bytes += AlignedBytes(segments.back().to.bytes());
  }
  if (segments.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(rounded_.Need(work, bytes));
  auto* next = rounded_.as<std::byte>();
  for (size_t i = 0; i < segments.size(); ++i) {
    matrices_[indices[i]] = segments[i].to.data = next;
    next += AlignedBytes(segments[i].to.bytes());
  }
  EK_ASSIGN_OR_RETURN(rounding_,
                      SegmentCopy::Create(work.runtime(), work.stream().device, segments));
  return absl::OkStatus();
}

absl::Status RoundedMatrices::Round(StreamRef stream) const {
  return rounding_.has_value() ? rounding_->Run(stream) : absl::OkStatus();
}

}  // namespace evenkeel
