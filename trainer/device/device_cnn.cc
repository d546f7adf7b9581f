#include <algorithm>
#include <optional>
#include <string>
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
#include "evenkeel/trainer/layers/residual_block.h"

namespace evenkeel {
namespace {

struct Norm : BatchNormIndices {
  DeviceNorm layer;
};

struct Conv {
  int weight = -1;
  DeviceConvolution shape;  // But for the batch.
};

// Batch norm, then a convolution, twice; beside them the skip (layers/residual_block.h).
struct Block {
  Norm norm1, norm2;
  Conv conv1, conv2;
  std::optional<Conv> shortcut;
  DeviceBuffer normed1 = {}, middle = {}, normed2 = {};
  DeviceBuffer skip = {};    // The shortcut's.
  DeviceBuffer output = {};  // The sum of the second convolution's output and the skip.
};

class DeviceCnn : public Model {
 public:
  DeviceCnn(const CnnOptions& options, DType dtype, std::unique_ptr<DeviceWork> work)
      : options_(options), dtype_(dtype), work_(std::move(work)) {}

  absl::Status Init(const DevicePlace& place, const Model& host) {
    EK_RETURN_IF_ERROR(InitOnDevice(place, host));
    stem_ = ConvOf("stem", options_.image.channels, options_.widths[0], options_.image.side,
                   /*kernel=*/3, /*stride=*/1);
    for (const ResidualBlockShape& shape : BlockShapes(options_, /*batch=*/1)) {
      const std::string name = absl::StrCat("block", blocks_.size() + 1);
      Block& block = blocks_.emplace_back();
      const auto [batch, inputs, outputs, side, stride] = shape;
      block.norm1 = NormOf(name + ".norm1");
      if (shape.changes_size())
        block.shortcut = ConvOf(name + ".shortcut", inputs, outputs, side, /*kernel=*/1, stride);
      block.conv1 = ConvOf(name + ".conv1", inputs, outputs, side, /*kernel=*/3, stride);
      block.norm2 = NormOf(name + ".norm2");
      block.conv2 = ConvOf(name + ".conv2", outputs, outputs, block.conv1.shape.out_side(),
                           /*kernel=*/3, /*stride=*/1);
    }
    norm_ = NormOf("norm");
    fc_weight_ = parameters().Find("fc.weight");
    fc_bias_ = parameters().Find("fc.bias");
    return matrices_.Init(*work_, *this, dtype_);
  }

  int64_t ActivationBytes() const override { return work_->held_bytes(); }

 private:
  Norm NormOf(const std::string& name) const {
    Norm norm;
    norm.weight = parameters().Find(name + ".weight");
    norm.bias = parameters().Find(name + ".bias");
    for (const NamedBuffer& buffer : buffers()) {
      if (buffer.name == name + ".running_mean")
        norm.running_mean = static_cast<float*>(buffer.value.data);
      if (buffer.name == name + ".running_variance")
        norm.running_variance = static_cast<float*>(buffer.value.data);
    }
    return norm;
  }

  Conv ConvOf(const std::string& name, int64_t inputs, int64_t outputs, int64_t side,
              int64_t kernel, int64_t stride) {
    return {.weight = parameters().Find(name + ".weight"),
            .shape = {.inputs = inputs,
                      .outputs = outputs,
                      .side = side,
                      .kernel = kernel,
                      .stride = stride}};
  }

  const float* Value(int index) const {
    return static_cast<const float*>(parameters()[index].value.data);
  }
  DeviceConvolution ShapeOf(const Conv& conv) const {
    DeviceConvolution shape = conv.shape;
    shape.dtype = dtype_;
    shape.batch = batch_;
    return shape;
  }
  // Return the shape of a convolution's input, and of its output.
  DeviceNorm::Images Before(const Conv& conv) const {
    return {dtype_, batch_, static_cast<int>(conv.shape.inputs),
            static_cast<int>(conv.shape.side * conv.shape.side)};
  }
  DeviceNorm::Images After(const Conv& conv) const {
    const int64_t side = conv.shape.out_side();
    return {dtype_, batch_, static_cast<int>(conv.shape.outputs), static_cast<int>(side * side)};
  }
  DeviceNorm::Images Features() const {
    return After(blocks_.empty() ? stem_ : blocks_.back().conv2);
  }
  DeviceDenseShape Dense() const { return {dtype_, batch_, options_.widths.back(), kClasses}; }
  TypedPointer Typed(void* data) const { return {dtype_, data}; }
  // Makes room for `count` elements that go from layer to layer.
  absl::Status Need(DeviceBuffer& buffer, int64_t count) {
    return buffer.Need(*work_, count * SizeOf(dtype_));
  }
  const void* BlockInput(size_t i) const {
    return i == 0 ? stem_output_.as<void>() : blocks_[i - 1].output.as<void>();
  }
  const void* LastOutput() const { return BlockInput(blocks_.size()); }

  absl::Status Check(const Batch& batch) const override {
    return CheckImages(batch, options_.image.pixels(), kClasses).status();
  }

  absl::Status Convolve(const Conv& conv, const void* input, DeviceBuffer& output) {
    EK_RETURN_IF_ERROR(Need(output, After(conv).count()));
    return Convolve(ConvolutionPass::kForward, conv,
                    {{input, matrices_[conv.weight], output.as<void>()}});
  }
  absl::Status Convolve(ConvolutionPass pass, const Conv& conv, const ConvolutionTensors& tensors) {
    return work_->math().Convolve(pass, ShapeOf(conv), tensors, work_->stream());
  }

  absl::Status Normalise(Norm& norm, const DeviceNorm::Images& images, Mode mode, const void* input,
                         DeviceBuffer& output) {
    EK_RETURN_IF_ERROR(Need(output, images.count()));
    return norm.layer.Forward(*work_, images, StateOf(norm, parameters()), mode == Mode::kTraining,
                              input, output.as<void>());
  }

  absl::Status BlockForward(Block& block, const void* source, Mode mode) {
    EK_RETURN_IF_ERROR(Normalise(block.norm1, Before(block.conv1), mode, source, block.normed1));
    if (block.shortcut)
      EK_RETURN_IF_ERROR(Convolve(*block.shortcut, block.normed1.as<void>(), block.skip));
    EK_RETURN_IF_ERROR(Convolve(block.conv1, block.normed1.as<void>(), block.middle));
    EK_RETURN_IF_ERROR(
        Normalise(block.norm2, Before(block.conv2), mode, block.middle.as<void>(), block.normed2));
    EK_RETURN_IF_ERROR(Convolve(block.conv2, block.normed2.as<void>(), block.output));
    return DeviceAddTo(*work_, block.shortcut ? block.skip.as<void>() : source,
                       Typed(block.output.as<void>()), After(block.conv2).count());
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode,
                                          const PassOptions& options) override {
    batch_ = SamplesOf(batch);
    EK_ASSIGN_OR_RETURN(const DeviceBatch here, work_->Upload(batch));
    EK_RETURN_IF_ERROR(matrices_.Round(work_->stream()));
    EK_ASSIGN_OR_RETURN(images_,
                        DeviceRounded(*work_, here.images, batch_ * options_.image.pixels(), dtype_,
                                      rounded_images_));
    EK_RETURN_IF_ERROR(Convolve(stem_, images_, stem_output_));
    for (size_t i = 0; i < blocks_.size(); ++i)
      EK_RETURN_IF_ERROR(BlockForward(blocks_[i], BlockInput(i), mode));
    EK_RETURN_IF_ERROR(Normalise(norm_, Features(), mode, LastOutput(), features_));
    const int64_t means = batch_ * options_.widths.back();
    EK_RETURN_IF_ERROR(Need(means_, means));
    EK_RETURN_IF_ERROR(DeviceAveragePool(*work_, features_.as<void>(), Typed(means_.as<void>()),
                                         means, Features().area));
    EK_RETURN_IF_ERROR(
        scores_.Need(*work_, batch_ * kClasses * static_cast<int64_t>(sizeof(float))));
    EK_RETURN_IF_ERROR(DeviceDense(*work_, Dense(), means_.as<void>(), matrices_[fc_weight_],
                                   Value(fc_bias_), {DType::kFloat32, scores_.as<float>()}));
    EK_RETURN_IF_ERROR(
        DeviceClassLoss(*work_, scores_.as<float>(), here.labels, batch_, kClasses,
                        mode == Mode::kTraining ? std::optional(options.weight) : std::nullopt));
    return work_->FetchLoss(batch_);
  }

  // `diff` becomes the gradient of what went in.
  absl::Status NormBackward(Norm& norm, const DeviceNorm::Images& images, const void* source,
                            const DeviceBuffer& output, void* diff, GradientSink& sink) {
    EK_RETURN_IF_ERROR(norm.layer.Backward(*work_, images, StateOf(norm, parameters()), source,
                                           output.as<void>(), diff, sink.Target<float>(norm.weight),
                                           sink.Target<float>(norm.bias)));
    EK_RETURN_IF_ERROR(sink.Announce(norm.bias));
    return sink.Announce(norm.weight);
  }

  absl::Status WeightBackward(const Conv& conv, const void* input, const void* diff,
                              GradientSink& sink) {
    return sink.Write<float>(conv.weight, [&](GradTarget<float> target) {
      return Convolve(ConvolutionPass::kBackwardWeight, conv,
                      {{input, target.data, diff}, target.add});
    });
  }

  absl::Status ImagesBackward(const Conv& conv, const void* diff, void* diff_images) {
    return Convolve(ConvolutionPass::kBackwardImages, conv,
                    {{diff_images, matrices_[conv.weight], diff}});
  }

  // From the gradient in diffs_[0] to that of the source, there as well; nothing of it is there if
  // nothing below the block's second convolution, or below its first norm, is trained.
  absl::Status BlockBackward(Block& block, const void* source, GradientSink& sink) {
    const void* const diff_output = diffs_[0].as<void>();
    void* const inner = diffs_[1].as<void>();
    void* const outer = diffs_[2].as<void>();
    EK_RETURN_IF_ERROR(WeightBackward(block.conv2, block.normed2.as<void>(), diff_output, sink));
    if (!sink.AnyTrainedBefore(block.conv2.weight)) return absl::OkStatus();

    EK_RETURN_IF_ERROR(ImagesBackward(block.conv2, diff_output, inner));
    EK_RETURN_IF_ERROR(NormBackward(block.norm2, Before(block.conv2), block.middle.as<void>(),
                                    block.normed2, inner, sink));
    EK_RETURN_IF_ERROR(WeightBackward(block.conv1, block.normed1.as<void>(), inner, sink));
    if (block.shortcut) {
      EK_RETURN_IF_ERROR(
          WeightBackward(*block.shortcut, block.normed1.as<void>(), diff_output, sink));
    }
    if (!sink.AnyTrainedBefore(block.norm1.bias + 1)) return absl::OkStatus();

    const DeviceNorm::Images images = Before(block.conv1);
    EK_RETURN_IF_ERROR(ImagesBackward(block.conv1, inner, outer));
    if (block.shortcut) {
      EK_RETURN_IF_ERROR(ImagesBackward(*block.shortcut, diff_output, inner));
      EK_RETURN_IF_ERROR(DeviceAddTo(*work_, inner, Typed(outer), images.count()));
    }
    EK_RETURN_IF_ERROR(NormBackward(block.norm1, images, source, block.normed1, outer, sink));
    if (!block.shortcut)
      EK_RETURN_IF_ERROR(DeviceAddTo(*work_, diff_output, Typed(outer), images.count()));
    std::swap(diffs_[0], diffs_[2]);
    return absl::OkStatus();
  }

  absl::Status DoBackward(GradientSink& sink) override {
    EK_ASSIGN_OR_RETURN(const void* const diff_scores,
                        DeviceRounded(*work_, scores_.as<float>(), batch_ * kClasses, dtype_,
                                      rounded_diff_scores_));
    EK_RETURN_IF_ERROR(DeviceDenseBackwardParameters(*work_, Dense(), fc_weight_, fc_bias_,
                                                     means_.as<void>(), diff_scores, sink));
    if (!sink.AnyTrainedBefore(fc_weight_)) return absl::OkStatus();

    EK_RETURN_IF_ERROR(NeedDiffs());
    const int64_t means = batch_ * options_.widths.back();
    EK_RETURN_IF_ERROR(DeviceDenseBackwardInput(*work_, Dense(), matrices_[fc_weight_], diff_scores,
                                                diff_means_.as<void>()));
    EK_RETURN_IF_ERROR(DeviceAveragePoolBackward(
        *work_, diff_means_.as<void>(), Typed(diffs_[0].as<void>()), means, Features().area));
    EK_RETURN_IF_ERROR(
        NormBackward(norm_, Features(), LastOutput(), features_, diffs_[0].as<void>(), sink));
    for (size_t i = blocks_.size(); i-- > 0;) {
      if (!sink.AnyTrainedBefore(blocks_[i].conv2.weight + 1)) return absl::OkStatus();
      EK_RETURN_IF_ERROR(BlockBackward(blocks_[i], BlockInput(i), sink));
    }
    return WeightBackward(stem_, images_, diffs_[0].as<void>(), sink);
  }

  // Each for the largest gradient of images.
  absl::Status NeedDiffs() {
    EK_RETURN_IF_ERROR(Need(diff_means_, batch_ * options_.widths.back()));
    int64_t count = After(stem_).count();
    for (const Block& block : blocks_) {
      count = std::max({count, Before(block.conv1).count(), After(block.conv1).count()});
    }
    for (DeviceBuffer& diff : diffs_) EK_RETURN_IF_ERROR(Need(diff, count));
    return absl::OkStatus();
  }

  const CnnOptions options_;
  const DType dtype_;  // The type in products and convolutions.
  RoundedMatrices matrices_;
  Conv stem_;
  std::vector<Block> blocks_;
  Norm norm_;
  int fc_weight_ = -1;
  int fc_bias_ = -1;

  DeviceBuffer rounded_images_;
  DeviceBuffer stem_output_;
  DeviceBuffer features_;  // After the last norm.
  DeviceBuffer means_;     // [batch, channels]
  DeviceBuffer scores_;    // [batch, 10]; after a training Forward their gradient
  DeviceBuffer rounded_diff_scores_;
  DeviceBuffer diff_means_;
  DeviceBuffer diffs_[3];  // Gradients of images, on their way down.
  int64_t batch_ = 0;
  const void* images_ = nullptr;  // From the last Forward.
  // Goes first, when the device is done with what lies in the others.
  std::unique_ptr<DeviceWork> work_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeDeviceCnn(const CnnOptions& options, const Model& host,
                                                     const DevicePlace& place, DType dtype) {
  EK_RETURN_IF_ERROR(CheckFactorType("cnn", dtype));
  if (options.syncs_norms) {
    return absl::UnimplementedError(
        "--sync_batch_norm is for the CPU; choose --device=cpu, or batch norm of each rank");
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<DeviceWork> work, DeviceWork::Create(place));
  auto model = std::make_unique<DeviceCnn>(options, dtype, std::move(work));
  EK_RETURN_IF_ERROR(model->Init(place, host));
  return model;
}

}  // namespace evenkeel
