#include "evenkeel/trainer/device/device_mlp.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/layers.h"
#include "evenkeel/trainer/image_shape.h"

namespace evenkeel {
namespace {

class DeviceMlp : public Model {
 public:
  DeviceMlp(const MlpOptions& options, std::unique_ptr<DeviceWork> work)
      : pixels_(options.image.pixels()), layers_(options.hidden.size() + 1), work_(std::move(work)) {}

  absl::Status Init(const DevicePlace& place, const Model& host) {
    EK_RETURN_IF_ERROR(InitOnDevice(place, host));
    for (size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      layer.weight = static_cast<int>(2 * i);
      layer.bias = layer.weight + 1;
      layer.outputs = shape(layer.weight)[0];
      layer.inputs = shape(layer.weight)[1];
    }
    return absl::OkStatus();
  }

  int64_t ActivationBytes() const override { return work_->held_bytes(); }

 private:
  struct Layer {
    int64_t inputs = 0;
    int64_t outputs = 0;
    int weight = -1;
    int bias = -1;
    DeviceBuffer output = {};  // [batch, outputs], after the rectifier; of the last layer scores, then their gradient.
    DeviceBuffer diff = {};    // Of it, before the rectifier; unused in the last layer.
  };

  const float* Value(int index) const { return static_cast<const float*>(parameters()[index].value.data); }
  DeviceDenseShape ShapeOf(const Layer& layer) const { return {batch_, layer.inputs, layer.outputs}; }
  int64_t BytesOf(const Layer& layer) const { return batch_ * layer.outputs * static_cast<int64_t>(sizeof(float)); }

  absl::Status Check(const Batch& batch) const override { return CheckImages(batch, pixels_, kClasses).status(); }

  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode, const PassOptions& options) override {
    batch_ = SamplesOf(batch);
    EK_ASSIGN_OR_RETURN(const DeviceBatch here, work_->Upload(batch));
    const float* input = images_ = here.images;
    for (Layer& layer : layers_) {
      EK_RETURN_IF_ERROR(layer.output.Need(*work_, BytesOf(layer)));
      float* const output = layer.output.as<float>();
      EK_RETURN_IF_ERROR(DeviceDense(*work_, ShapeOf(layer), input, Value(layer.weight), Value(layer.bias), output));
      if (&layer != &layers_.back()) EK_RETURN_IF_ERROR(DeviceRelu(*work_, output, batch_ * layer.outputs));
      input = output;
    }
    EK_RETURN_IF_ERROR(DeviceClassLoss(*work_, layers_.back().output.as<float>(), here.labels, batch_, kClasses,
                                       mode == Mode::kTraining ? std::optional(options.weight) : std::nullopt));
    return work_->FetchLoss(batch_);
  }

  absl::Status DoBackward(GradientSink& sink) override {
    const float* diff = layers_.back().output.as<float>();
    for (size_t i = layers_.size(); i-- > 0;) {
      const Layer& layer = layers_[i];
      const DeviceDenseShape shape = ShapeOf(layer);
      EK_RETURN_IF_ERROR(sink.Write<float>(layer.bias, [&](GradTarget<float> target) {
        return DeviceColumnSums(*work_, diff, batch_, layer.outputs, target);
      }));
      const float* input = i > 0 ? layers_[i - 1].output.as<float>() : images_;
      EK_RETURN_IF_ERROR(sink.Write<float>(layer.weight, [&](GradTarget<float> target) {
        return DeviceDenseBackwardWeight(*work_, shape, input, diff, target);
      }));
      if (!sink.AnyTrainedBefore(layer.weight)) return absl::OkStatus();

      Layer& below = layers_[i - 1];
      EK_RETURN_IF_ERROR(below.diff.Need(*work_, BytesOf(below)));
      float* const diff_below = below.diff.as<float>();
      EK_RETURN_IF_ERROR(DeviceDenseBackwardInput(*work_, shape, Value(layer.weight), diff, diff_below));
      EK_RETURN_IF_ERROR(DeviceReluBackward(*work_, below.output.as<float>(), diff_below, batch_ * below.outputs));
      diff = diff_below;
    }
    return absl::OkStatus();
  }

  const int pixels_;
  std::vector<Layer> layers_;
  std::unique_ptr<DeviceWork> work_;  // Goes first, when the device is done with what lies in the layers.

  int64_t batch_ = 0;
  const float* images_ = nullptr;  // [batch, pixels]
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeDeviceMlp(const MlpOptions& options, const Model& host,
                                                     const DevicePlace& place) {
  if (options.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(
        absl::StrCat("mlp: computes in float32 on ", ToString(place.device), ", not in ", ToString(options.dtype)));
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<DeviceWork> work, DeviceWork::Create(place));
  auto model = std::make_unique<DeviceMlp>(options, std::move(work));
  EK_RETURN_IF_ERROR(model->Init(place, host));
  return model;
}

}  // namespace evenkeel
