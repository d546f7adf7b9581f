#include "evenkeel/trainer/cnn.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/image_shape.h"
#include "evenkeel/trainer/initialize.h"
#include "evenkeel/trainer/layers/average_pool.h"
#include "evenkeel/trainer/layers/batch_norm_relu.h"
#include "evenkeel/trainer/layers/convolution.h"
#include "evenkeel/trainer/layers/dense.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/residual_block.h"
#include "evenkeel/trainer/layers/softmax_cross_entropy.h"

namespace evenkeel {
namespace {

// Where the network's parameters are in the parameter set.
struct CnnIndices {
  int stem = -1;
  std::vector<ResidualBlockIndices> blocks;
  BatchNormIndices norm;
  int fc_weight = -1;
  int fc_bias = -1;
};

// The network for one batch size: kernels, activations and gradients of activations.
class Network {
 public:
  Network(const OneDnn& dnn, int batch, Mode mode, const ImageShape& image, const std::vector<int>& widths,
          const CnnIndices& indices)
      : batch_(batch),
        mode_(mode),
        indices_(indices),
        dense_{batch, widths.back(), kClasses},
        images_(dnn.Allocate({{batch, image.channels, image.side, image.side},
                              dnnl::memory::data_type::f32,
                              dnnl::memory::format_tag::nchw})),
        stem_(dnn, {.batch = batch, .inputs = image.channels, .outputs = widths[0], .side = image.side},
              images_.get_desc(), mode),
        blocks_(MakeBlocks(dnn, image, widths)),
        norm_(dnn, FeaturesDesc(), mode),
        pool_(dnn, FeaturesDesc(), mode),
        scores_(batch * kClasses),
        diff_means_(batch * widths.back()) {}

  int batch() const { return batch_; }
  Mode mode() const { return mode_; }

  absl::StatusOr<BatchResult> Forward(const ImageBatch& batch, double weight, const ParameterSet& parameters) {
    const auto& [images, labels] = batch;
    std::memcpy(images_.get_data_handle(), images.data(), images.size_bytes());
    dnnl::memory features = stem_.Forward(images_, Value(parameters, indices_.stem));
    for (ResidualBlock& block : blocks_) features = block.Forward(features, parameters);
    means_ = pool_.Forward(norm_.Forward(features, StateOf(indices_.norm, parameters)));
    EK_RETURN_IF_ERROR(DenseForward(products_, dense_, Activation::kNone, means_, Value(parameters, indices_.fc_weight),
                                    Value(parameters, indices_.fc_bias), scores_.data()));

    // The scores' gradient takes their place: it is all that Backward needs of them.
    const LossResult loss = SoftmaxCrossEntropy<float>(
        scores_, labels, mode_ == Mode::kTraining ? std::span<float>(scores_) : std::span<float>(), weight);
    return BatchResult{.loss_mean = loss.sum / batch_, .correct = loss.correct};
  }

  absl::Status Backward(const ParameterSet& parameters, GradientSink& sink) {
    EK_RETURN_IF_ERROR(sink.Write<float>(indices_.fc_bias, [&](GradTarget<float> target) {
      DenseBackwardBias(dense_, scores_.data(), target);
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(sink.Write<float>(indices_.fc_weight, [&](GradTarget<float> target) {
      return DenseBackwardWeight(products_, dense_, means_, scores_.data(), target);
    }));
    if (!sink.AnyTrainedBefore(indices_.fc_weight)) return absl::OkStatus();

    EK_RETURN_IF_ERROR(DenseBackwardInput(products_, dense_, Value(parameters, indices_.fc_weight), scores_.data(),
                                          diff_means_.data()));
    EK_ASSIGN_OR_RETURN(dnnl::memory diff,
                        BackwardNorm(norm_, indices_.norm, pool_.Backward(diff_means_.data()), sink));
    for (size_t i = blocks_.size(); i-- > 0;) {
      if (!sink.AnyTrainedBefore(indices_.blocks[i].conv2 + 1)) return absl::OkStatus();
      EK_ASSIGN_OR_RETURN(diff, blocks_[i].Backward(diff, sink));
    }
    return sink.Write<float>(indices_.stem, [&](GradTarget<float> target) {
      stem_.BackwardWeight(diff, target);
      return absl::OkStatus();
    });
  }

 private:
  static const float* Value(const ParameterSet& parameters, int index) {
    return static_cast<const float*>(parameters[index].value.data);
  }

  dnnl::memory::desc FeaturesDesc() const {
    return blocks_.empty() ? stem_.output_desc() : blocks_.back().output_desc();
  }

  std::vector<ResidualBlock> MakeBlocks(const OneDnn& dnn, const ImageShape& image,
                                        const std::vector<int>& widths) const {
    std::vector<ResidualBlock> blocks;
    blocks.reserve(widths.size() - 1);
    dnnl::memory::desc source_desc = stem_.output_desc();
    int side = image.side;
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      const ResidualBlockShape shape{
          .batch = batch_, .inputs = widths[i], .outputs = widths[i + 1], .side = side, .stride = 2};
      blocks.emplace_back(dnn, shape, indices_.blocks[i], source_desc, mode_);
      source_desc = blocks.back().output_desc();
      side = (side + 1) / 2;
    }
    return blocks;
  }

  const int batch_;
  const Mode mode_;
  const CnnIndices& indices_;
  const DenseShape dense_;
  MatrixProducts<float> products_;
  dnnl::memory images_;
  Convolution stem_;
  std::vector<ResidualBlock> blocks_;
  BatchNormRelu norm_;
  AveragePool pool_;
  const float* means_ = nullptr;   // [batch, channels], the pool's memory
  std::vector<float> scores_;      // [batch, 10]; after a training Forward their gradient
  std::vector<float> diff_means_;  // [batch, channels]
};

class Cnn : public Model {
 public:
  explicit Cnn(const CnnOptions& options) : image_(options.image), widths_(options.widths), seed_(options.seed) {
    indices_.stem = AddConvolution("stem", image_.channels, widths_[0], 3);
    for (size_t i = 0; i + 1 < widths_.size(); ++i) {
      indices_.blocks.push_back(AddBlock(absl::StrCat("block", i + 1), widths_[i], widths_[i + 1]));
    }
    indices_.norm = AddNorm("norm", widths_.back());
    indices_.fc_weight = AddUniform("fc.weight", {kClasses, widths_.back()}, 1 / std::sqrt(widths_.back()));
    indices_.fc_bias = AddUniform("fc.bias", {kClasses}, 1 / std::sqrt(widths_.back()));
  }

 private:
  // Kernels and activations of this many batch sizes and modes are kept: the usual one, the last of an epoch, and the
  // same two in evaluation.
  static constexpr size_t kNetworksKept = 4;

  int AddUniform(std::string name, std::vector<int64_t> shape, double limit) {
    const int index = AddParameter(std::move(name), DType::kFloat32, std::move(shape));
    FillUniform(parameters()[index].value.as<float>(), limit, StableRandom(seed_, index));
    return index;
  }

  int AddConvolution(const std::string& name, int inputs, int outputs, int kernel) {
    return AddUniform(name + ".weight", {outputs, inputs, kernel, kernel}, std::sqrt(6.0 / (inputs * kernel * kernel)));
  }

  BatchNormIndices AddNorm(const std::string& name, int channels) {
    BatchNormIndices norm;
    norm.weight = AddParameter(name + ".weight", DType::kFloat32, {channels});
    std::ranges::fill(parameters()[norm.weight].value.as<float>(), 1.0f);
    norm.bias = AddParameter(name + ".bias", DType::kFloat32, {channels});
    norm.running_mean = AddBuffer(name + ".running_mean", {channels}, 0).data();
    norm.running_variance = AddBuffer(name + ".running_variance", {channels}, 1).data();
    return norm;
  }

  ResidualBlockIndices AddBlock(const std::string& name, int inputs, int outputs) {
    ResidualBlockIndices block;
    block.norm1 = AddNorm(name + ".norm1", inputs);
    block.shortcut = AddConvolution(name + ".shortcut", inputs, outputs, 1);
    block.conv1 = AddConvolution(name + ".conv1", inputs, outputs, 3);
    block.norm2 = AddNorm(name + ".norm2", outputs);
    block.conv2 = AddConvolution(name + ".conv2", outputs, outputs, 3);
    return block;
  }

  // The network for this batch size, the most recently used first; throws dnnl::error.
  Network& NetworkFor(int batch, Mode mode) {
    const auto fits = [&](const auto& network) { return network->batch() == batch && network->mode() == mode; };
    auto found = std::ranges::find_if(networks_, fits);
    if (found == networks_.end()) {
      if (networks_.size() == kNetworksKept) networks_.pop_back();
      networks_.push_back(std::make_unique<Network>(dnn_, batch, mode, image_, widths_, indices_));
      found = networks_.end() - 1;
    }
    std::rotate(networks_.begin(), found, found + 1);
    return *networks_.front();
  }

  absl::Status Check(const Batch& batch) const override {
    return CheckImages(batch, image_.pixels(), kClasses).status();
  }

  absl::StatusOr<BatchResult> DoForward(const Batch& batch, Mode mode, const PassOptions& options) override {
    BatchResult result;
    EK_RETURN_IF_ERROR(StatusFromOneDnn("cnn forward", [&]() -> absl::Status {
      Network& network = NetworkFor(static_cast<int>(SamplesOf(batch)), mode);
      EK_ASSIGN_OR_RETURN(result, network.Forward(std::get<ImageBatch>(batch), options.weight, parameters()));
      return absl::OkStatus();
    }));
    return result;
  }

  absl::Status DoBackward(GradientSink& sink) override {
    return StatusFromOneDnn("cnn backward", [&] { return networks_.front()->Backward(parameters(), sink); });
  }

  const ImageShape image_;
  const std::vector<int> widths_;
  const uint64_t seed_;
  CnnIndices indices_;
  OneDnn dnn_;
  std::vector<std::unique_ptr<Network>> networks_;  // The front one did the last Forward.
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeCnn(const CnnOptions& options) {
  const auto is_possible = [](int width) { return width >= 1 && width <= 1024; };
  if (options.widths.empty() || options.widths.size() > 5 || !std::ranges::all_of(options.widths, is_possible)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cnn: needs 1 to 5 widths of 1 to 1024 channels, got [", absl::StrJoin(options.widths, ","), "]"));
  }
  std::unique_ptr<Model> model;
  EK_RETURN_IF_ERROR(StatusFromOneDnn("cnn", [&] {
    model = std::make_unique<Cnn>(options);
    return absl::OkStatus();
  }));
  return model;
}

}  // namespace evenkeel
