#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/layers.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/rounded_matrices.h"

namespace evenkeel {
namespace {

class DeviceMlp : public Model {
 public:
  DeviceMlp(const MlpOptions& options, DType dtype, std::unique_ptr<DeviceWork> work)
      : pixels_(options.image.pixels()),
        dtype_(dtype),
        layers_(options.hidden.size() + 1),
        work_(std::move(work)) {}

  absl::Status Init(const DevicePlace& place, const Model& host) {
    EK_RETURN_IF_ERROR(InitOnDevice(place, host));
    for (size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      layer.weight = static_cast<int>(2 * i);
      layer.bias = layer.weight + 1;
      layer.outputs = shape(layer.weight)[0];
      layer.inputs = shape(layer.weight)[1];
    }
    return matrices_.Init(*work_, *this, dtype_);
  }

  int64_t ActivationBytes() const override { return work_->held_bytes(); }

 private:
  struct Layer {
    int64_t inputs = 0;
    int64_t outputs = 0;
    int weight = -1;
    int bias = -1;
    // [batch, outputs], after the rectifier; of the last layer float32 scores.
    DeviceBuffer output;
    // Its gradient, before the rectifier; in float32 the last layer's scores become it.
    DeviceBuffer diff;
  };

  const float* Bias(const Layer& layer) const {
    return static_cast<const float*>(parameters()[layer.bias].value.data);
  }
  DeviceDenseShape ShapeOf(const Layer& layer) const {
    return {dtype_, batch_, layer.inputs, layer.outputs};
  }
  TypedPointer Typed(const DeviceBuffer& buffer) const { return {dtype_, buffer.as<void>()}; }

  absl::Status Check(const Batch& batch) const override {
    return CheckImages(batch, pixels_, kClasses).status();
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode,
                                          const PassOptions& options) override {
    batch_ = SamplesOf(batch);
    EK_ASSIGN_OR_RETURN(const DeviceBatch here, work_->Upload(batch));
    EK_RETURN_IF_ERROR(matrices_.Round(work_->stream()));
    EK_ASSIGN_OR_RETURN(
        images_, DeviceRounded(*work_, here.images, batch_ * pixels_, dtype_, rounded_images_));
    const void* input = images_;
    for (Layer& layer : layers_) {
      const bool is_last = &layer == &layers_.back();
      const DType type = is_last ? DType::kFloat32 : dtype_;
      const int64_t count = batch_ * layer.outputs;
      EK_RETURN_IF_ERROR(layer.output.Need(*work_, count * SizeOf(type)));
      const TypedPointer output{type, layer.output.as<void>()};
      EK_RETURN_IF_ERROR(
          DeviceDense(*work_, ShapeOf(layer), input, matrices_[layer.weight], Bias(layer), output));
      if (!is_last) EK_RETURN_IF_ERROR(DeviceRelu(*work_, output, count));
      input = output.data;
    }
    EK_RETURN_IF_ERROR(
        DeviceClassLoss(*work_, layers_.back().output.as<float>(), here.labels, batch_, kClasses,
                        mode == Mode::kTraining ? std::optional(options.weight) : std::nullopt));
    return work_->FetchLoss(batch_);
  }

  absl::Status DoBackward(GradientSink& sink) override {
    Layer& last = layers_.back();
    EK_ASSIGN_OR_RETURN(const void* diff, DeviceRounded(*work_, last.output.as<float>(),
                                                        batch_ * last.outputs, dtype_, last.diff));
    for (size_t i = layers_.size(); i-- > 0;) {
      const Layer& layer = layers_[i];
      const DeviceDenseShape shape = ShapeOf(layer);
      const void* input = i > 0 ? layers_[i - 1].output.as<void>() : images_;
      EK_RETURN_IF_ERROR(DeviceDenseBackwardParameters(*work_, shape, layer.weight, layer.bias,
                                                       input, diff, sink));
      if (!sink.AnyTrainedBefore(layer.weight)) return absl::OkStatus();

      Layer& below = layers_[i - 1];
      const int64_t count = batch_ * below.outputs;
      EK_RETURN_IF_ERROR(below.diff.Need(*work_, count * SizeOf(dtype_)));
      EK_RETURN_IF_ERROR(DeviceDenseBackwardInput(*work_, shape, matrices_[layer.weight], diff,
                                                  below.diff.as<void>()));
      EK_RETURN_IF_ERROR(
          DeviceReluBackward(*work_, below.output.as<void>(), Typed(below.diff), count));
      diff = below.diff.as<void>();
    }
    return absl::OkStatus();
  }

  const int pixels_;
  const DType dtype_;  // The type in products.
  std::vector<Layer> layers_;
  RoundedMatrices matrices_;
  DeviceBuffer rounded_images_;
  // Goes first, when the device is done with what lies in the layers.
  std::unique_ptr<DeviceWork> work_;

  int64_t batch_ = 0;
  const void* images_ = nullptr;  // [batch, pixels]
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeDeviceMlp(const MlpOptions& options, const Model& host,
                                                     const DevicePlace& place, DType dtype) {
  if (options.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat("mlp: on ", ToString(place.device),
                                                   " its parameters are float32, not ",
                                                   ToString(options.dtype)));
  }
  EK_RETURN_IF_ERROR(CheckFactorType("mlp", dtype));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<DeviceWork> work, DeviceWork::Create(place));
  auto model = std::make_unique<DeviceMlp>(options, dtype, std::move(work));
  EK_RETURN_IF_ERROR(model->Init(place, host));
  return model;
}

}  // namespace evenkeel
