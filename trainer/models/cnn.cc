#include "evenkeel/trainer/models/cnn.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/layers/average_pool.h"
#include "evenkeel/trainer/layers/batch_norm_relu.h"
#include "evenkeel/trainer/layers/convolution.h"
#include "evenkeel/trainer/layers/initialize.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/layers/token_loss.h"

namespace evenkeel {
std::vector<ResidualBlockShape> BlockShapes(const CnnOptions& options, int batch) {
  std::vector<ResidualBlockShape> shapes;
  ResidualBlockShape shape{.batch = batch, .inputs = options.widths[0], .side = options.image.side};
  for (size_t stage = 1; stage < options.widths.size(); ++stage) {
    shape.outputs = options.widths[stage];
    shape.stride = 2;
    for (int block = 0; block < options.blocks_per_stage; ++block) {
      shapes.push_back(shape);
      shape.inputs = shape.outputs;
      shape.side = (shape.side - 1) / shape.stride + 1;
      shape.stride = 1;
    }
  }
  return shapes;
}

namespace {

// The indices of the network's parameters in the parameter set.
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
  Network(const OneDnn& dnn, int batch, Mode mode, const CnnOptions& options,
          const CnnIndices& indices, BatchNormSync& sync)
      : batch_(batch),
        mode_(mode),
        sync_(options.syncs_norms ? &sync : nullptr),
        indices_(indices),
        dense_(LinearShape::FromOutputs(batch, options.widths.back(), kClasses)),
        images_(
            dnn.Allocate({{batch, options.image.channels, options.image.side, options.image.side},
                          dnnl::memory::data_type::f32,
                          dnnl::memory::format_tag::nchw})),
        stem_(dnn,
              {.batch = batch,
               .inputs = options.image.channels,
               .outputs = options.widths[0],
               .side = options.image.side},
              images_.get_desc(), mode),
        blocks_(MakeBlocks(dnn, BlockShapes(options, batch))),
        norm_(dnn, FeaturesDesc(), mode, sync_),
        pool_(dnn, FeaturesDesc(), mode),
        scores_(batch * kClasses),
        diff_means_(batch * options.widths.back()) {}

  int batch() const { return batch_; }
  int64_t bytes = 0;  // That it took.
  Mode mode() const { return mode_; }

  absl::StatusOr<BatchResult> Forward(const ImageBatch& batch, double weight,
                                      const ParameterSet& parameters) {
    const auto& [images, labels] = batch;
    std::memcpy(images_.get_data_handle(), images.data(), images.size_bytes());
    dnnl::memory features = stem_.Forward(images_, Value(parameters, indices_.stem));
    for (ResidualBlock& block : blocks_) features = block.Forward(features, parameters);
    means_ = pool_.Forward(norm_.Forward(features, StateOf(indices_.norm, parameters)));
    if (sync_ != nullptr) EK_RETURN_IF_ERROR(sync_->status);
    EK_RETURN_IF_ERROR(products_.Run(dense_.BackwardInput(), means_,
                                     Value(parameters, indices_.fc_weight),
                                     Value(parameters, indices_.fc_bias), scores_.data()));

    // The scores' gradient takes their place: it is all that Backward needs of them.
    const TokenLossResult loss =
        TokenLoss<float, float, uint8_t>(kClasses, scores_.data(), labels, weight / batch_,
                                         mode_ == Mode::kTraining ? scores_.data() : nullptr);
    return BatchResult{.loss_mean = loss.sum / batch_, .correct = loss.correct};
  }

  absl::Status Backward(const ParameterSet& parameters, GradientSink& sink) {
    EK_RETURN_IF_ERROR(sink.Write<float>(indices_.fc_bias, [&](GradTarget<float> target) {
      SumRows(batch_, kClasses, scores_.data(), target);
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(sink.Write<float>(indices_.fc_weight, [&](GradTarget<float> target) {
      return products_.Run(dense_.BackwardWeight(target.add), scores_.data(), means_, nullptr,
                           target.data);
    }));
    if (!sink.AnyTrainedBefore(indices_.fc_weight)) return absl::OkStatus();

    EK_RETURN_IF_ERROR(products_.Run(dense_.Forward(), scores_.data(),
                                     Value(parameters, indices_.fc_weight), nullptr,
                                     diff_means_.data()));
    EK_ASSIGN_OR_RETURN(dnnl::memory diff, BackwardNorm(norm_, indices_.norm,
                                                        pool_.Backward(diff_means_.data()), sink));
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

  std::vector<ResidualBlock> MakeBlocks(const OneDnn& dnn,
                                        const std::vector<ResidualBlockShape>& shapes) const {
    std::vector<ResidualBlock> blocks;
    blocks.reserve(shapes.size());
    dnnl::memory::desc source_desc = stem_.output_desc();
    for (size_t i = 0; i < shapes.size(); ++i) {
      blocks.emplace_back(dnn, shapes[i], indices_.blocks[i], source_desc, mode_, sync_);
      source_desc = blocks.back().output_desc();
    }
    return blocks;
  }

  const int batch_;
  const Mode mode_;
  BatchNormSync* const sync_;  // Null unless norms are over all ranks.
  const CnnIndices& indices_;
  const LinearShape dense_;
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

absl::Status CheckOptions(const CnnOptions& options) {
  const auto is_possible = [](int width) {
    return width >= 1 && width <= CnnOptions::kMaxChannels;
  };
  if (options.widths.empty() || options.widths.size() > CnnOptions::kMaxWidths ||
      !std::ranges::all_of(options.widths, is_possible)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cnn: needs 1 to 5 widths of 1 to 1024 channels, got [",
                     absl::StrJoin(options.widths, ","), "]"));
  }
  if (options.blocks_per_stage < 1 || options.blocks_per_stage > CnnOptions::kMaxBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("cnn: needs 1 to 32 blocks per stage, got ", options.blocks_per_stage));
  }
  const auto [channels, side] = options.image;
  if (channels >= 1 && channels <= 16 && side >= 1 && side <= 512) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("cnn: needs images of 1 to 16 channels with a side of 1 to 512, got ", channels,
                   " channels of ", side, "x", side));
}

class Cnn : public Model {
 public:
  explicit Cnn(const CnnOptions& options) : Model(options.is_plan), options_(options) {
    dnn_.only_counts = options.is_plan;
    const std::vector<int>& widths = options_.widths;
    indices_.stem = AddConvolution("stem", options_.image.channels, widths[0], 3);
    for (const ResidualBlockShape& shape : BlockShapes(options_, /*batch=*/1)) {
      indices_.blocks.push_back(AddBlock(absl::StrCat("block", indices_.blocks.size() + 1), shape));
    }
    indices_.norm = AddNorm("norm", widths.back());
    indices_.fc_weight =
        AddUniform("fc.weight", {kClasses, widths.back()}, 1 / std::sqrt(widths.back()));
    indices_.fc_bias = AddUniform("fc.bias", {kClasses}, 1 / std::sqrt(widths.back()));
  }

  int64_t ActivationBytes() const override {
    int64_t bytes = 0;
    for (const auto& network : networks_) bytes += network->bytes;
    return bytes;
  }

  void SetScope(JoinScope* scope) override { sync_.scope = scope; }

  absl::Status PlanPass(int64_t samples, Mode mode) override {
    return StatusFromOneDnn("cnn", [&] {
      NetworkFor(static_cast<int>(samples), mode);
      return absl::OkStatus();
    });
  }

 private:
  // Kernels and activations of this many batch sizes and modes are kept: the usual one, the last of
  // an epoch, and the same two in evaluation.
  static constexpr size_t kNetworksKept = 4;

  int AddUniform(std::string name, std::vector<int64_t> shape, double limit) {
    const int index = AddParameter(std::move(name), DType::kFloat32, std::move(shape));
    FillUniform(Initial<float>(index), limit, StableRandom(options_.seed, index));
    return index;
  }

  int AddConvolution(const std::string& name, int inputs, int outputs, int kernel) {
    return AddUniform(name + ".weight", {outputs, inputs, kernel, kernel},
                      std::sqrt(6.0 / (inputs * kernel * kernel)));
  }

  BatchNormIndices AddNorm(const std::string& name, int channels) {
    BatchNormIndices norm;
    norm.weight = AddParameter(name + ".weight", DType::kFloat32, {channels});
    std::ranges::fill(Initial<float>(norm.weight), 1.0f);
    norm.bias = AddParameter(name + ".bias", DType::kFloat32, {channels});
    norm.running_mean = AddBuffer(name + ".running_mean", {channels}, 0).data();
    norm.running_variance = AddBuffer(name + ".running_variance", {channels}, 1).data();
    return norm;
  }

  ResidualBlockIndices AddBlock(const std::string& name, const ResidualBlockShape& shape) {
    ResidualBlockIndices block;
    block.norm1 = AddNorm(name + ".norm1", shape.inputs);
    if (shape.changes_size())
      block.shortcut = AddConvolution(name + ".shortcut", shape.inputs, shape.outputs, 1);
    block.conv1 = AddConvolution(name + ".conv1", shape.inputs, shape.outputs, 3);
    block.norm2 = AddNorm(name + ".norm2", shape.outputs);
    block.conv2 = AddConvolution(name + ".conv2", shape.outputs, shape.outputs, 3);
    return block;
  }

  // The network for this batch size, the most recently used first; throws dnnl::error.
  Network& NetworkFor(int batch, Mode mode) {
    const auto fits = [&](const auto& network) {
      return network->batch() == batch && network->mode() == mode;
    };
    auto found = std::ranges::find_if(networks_, fits);
    if (found == networks_.end()) {
      if (networks_.size() == kNetworksKept) networks_.pop_back();
      const int64_t before = dnn_.allocated;
      networks_.push_back(std::make_unique<Network>(dnn_, batch, mode, options_, indices_, sync_));
      networks_.back()->bytes = dnn_.allocated - before;
      found = networks_.end() - 1;
    }
    std::rotate(networks_.begin(), found, found + 1);
    return *networks_.front();
  }

  absl::Status Check(const Batch& batch) const override {
    return CheckImages(batch, options_.image.pixels(), kClasses).status();
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode,
                                          const PassOptions& options) override {
    sync_.status = absl::OkStatus();
    if (options_.syncs_norms && mode == Mode::kTraining && sync_.scope == nullptr)
      return absl::FailedPreconditionError("cnn: synchronised batch norms need a training loop");
    return StatusFromOneDnn("cnn forward", [&]() -> absl::StatusOr<PendingResult> {
      Network& network = NetworkFor(static_cast<int>(SamplesOf(batch)), mode);
      return network.Forward(std::get<ImageBatch>(batch), options.weight, parameters());
    });
  }

  absl::Status DoBackward(GradientSink& sink) override {
    EK_RETURN_IF_ERROR(StatusFromOneDnn(
        "cnn backward", [&] { return networks_.front()->Backward(parameters(), sink); }));
    return sync_.status;
  }

  const CnnOptions options_;
  CnnIndices indices_;
  OneDnn dnn_;
  BatchNormSync sync_;
  std::vector<std::unique_ptr<Network>> networks_;  // The front one did the last Forward.
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeCnn(const CnnOptions& options) {
  EK_RETURN_IF_ERROR(CheckOptions(options));
  return IfMemoryAllows("cnn: not enough memory for its parameters and their gradients", [&] {
    return StatusFromOneDnn("cnn", [&]() -> absl::StatusOr<std::unique_ptr<Model>> {
      return std::make_unique<Cnn>(options);
    });
  });
}

}  // namespace evenkeel
