#include "evenkeel/trainer/device/device_gpt.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/gpt_layers.h"
#include "evenkeel/trainer/device/internal/device_gpt_model.h"

namespace evenkeel {
namespace {

absl::Status Check(const GptOptions& options, const DevicePlace& place, const DeviceGptOptions& device_options) {
  if (place.is_host() || place.math == nullptr) {
    return absl::InvalidArgumentError("gpt: a model on a device needs a device and its products of matrices");
  }
  if (options.compute == GptCompute::kFloat64) {
    return absl::InvalidArgumentError("gpt: on a device it computes in float32 or bfloat16, not in float64");
  }
  if (options.width > kMostNormWidth) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpt: on a device its width may be ", kMostNormWidth, ", not ", options.width));
  }
  if (device_options.attention_rows < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpt: attention takes at least 1 row at a time, not ", device_options.attention_rows));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Gpt>> MakeDeviceGpt(const Gpt& host, const DevicePlace& place,
                                                   const DeviceGptOptions& options) {
  EK_RETURN_IF_ERROR(Check(host.options(), place, options));
  auto model = std::make_unique<DeviceGptModel>(host.options(), options);
  EK_RETURN_IF_ERROR(model->Init(host, place));
  return model;
}

}  // namespace evenkeel
