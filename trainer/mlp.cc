#include "evenkeel/trainer/mlp.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/image_shape.h"
#include "evenkeel/trainer/initialize.h"
#include "evenkeel/trainer/layers/dense.h"
#include "evenkeel/trainer/layers/elementwise.h"
#include "evenkeel/trainer/layers/softmax_cross_entropy.h"

namespace evenkeel {
namespace {

template <typename T>
class Mlp : public Model {
 public:
  explicit Mlp(const MlpOptions& options)
      : hidden_size_(options.hidden),
        fc1_(AddLayer("fc1", kImagePixels, options.hidden, options.seed)),
        fc2_(AddLayer("fc2", options.hidden, kClasses, options.seed)) {}

 private:
  struct Layer {
    int weight;
    int bias;
  };

  Layer AddLayer(const std::string& name, int inputs, int outputs, uint64_t seed) {
    const Layer layer{AddParameter(name + ".weight", DTypeOf<T>::value, {outputs, inputs}),
                      AddParameter(name + ".bias", DTypeOf<T>::value, {outputs})};
    for (int index : {layer.weight, layer.bias}) {
      FillUniform(parameters()[index].value.template as<T>(), 1 / std::sqrt(inputs), StableRandom(seed, index));
    }
    return layer;
  }

  const T* Value(int index) const { return static_cast<const T*>(parameters()[index].value.data); }
  DenseShape Fc1Shape() const { return {batch_, kImagePixels, hidden_size_}; }
  DenseShape Fc2Shape() const { return {batch_, hidden_size_, kClasses}; }

  absl::StatusOr<BatchResult> DoForward(std::span<const float> images, std::span<const uint8_t> labels,
                                        Mode mode) override {
    batch_ = static_cast<int64_t>(labels.size());
    images_.assign(images.begin(), images.end());
    hidden_.resize(batch_ * hidden_size_);
    scores_.resize(batch_ * kClasses);

    EK_RETURN_IF_ERROR(DenseForward(Fc1Shape(), images_.data(), Value(fc1_.weight), Value(fc1_.bias), hidden_.data()));
    ReluForward<T>(hidden_, hidden_);
    EK_RETURN_IF_ERROR(DenseForward(Fc2Shape(), hidden_.data(), Value(fc2_.weight), Value(fc2_.bias), scores_.data()));

    // The scores' gradient takes their place: it is all that Backward needs of them.
    const LossResult loss =
        SoftmaxCrossEntropy<T>(scores_, labels, mode == Mode::kTraining ? std::span<T>(scores_) : std::span<T>());
    return BatchResult{.loss_mean = loss.sum / static_cast<double>(batch_), .correct = loss.correct};
  }

  absl::Status DoBackward(GradientSink& sink) override {
    EK_RETURN_IF_ERROR(BackwardParameters(Fc2Shape(), fc2_, hidden_, scores_, sink));
    if (!sink.AnyTrainedBefore(fc2_.weight)) return absl::OkStatus();

    diff_hidden_.resize(hidden_.size());
    EK_RETURN_IF_ERROR(DenseBackwardInput(Fc2Shape(), Value(fc2_.weight), scores_.data(), diff_hidden_.data()));
    ReluBackward<T>(hidden_, diff_hidden_);
    return BackwardParameters(Fc1Shape(), fc1_, images_, diff_hidden_, sink);
  }

  static absl::Status BackwardParameters(const DenseShape& shape, const Layer& layer, const std::vector<T>& input,
                                         const std::vector<T>& diff_output, GradientSink& sink) {
    EK_RETURN_IF_ERROR(sink.Write<T>(layer.bias, [&](GradTarget<T> target) {
      DenseBackwardBias(shape, diff_output.data(), target);
      return absl::OkStatus();
    }));
    return sink.Write<T>(layer.weight, [&](GradTarget<T> target) {
      return DenseBackwardWeight(shape, input.data(), diff_output.data(), target);
    });
  }

  const int64_t hidden_size_;
  const Layer fc1_;
  const Layer fc2_;

  int64_t batch_ = 0;
  std::vector<T> images_;       // [batch, 784]
  std::vector<T> hidden_;       // [batch, hidden], after the rectifier
  std::vector<T> scores_;       // [batch, 10]; after a training Forward their gradient
  std::vector<T> diff_hidden_;  // [batch, hidden]
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeMlp(const MlpOptions& options) {
  if (options.hidden < 1 || options.hidden > 65536) {
    return absl::InvalidArgumentError(absl::StrCat("mlp: hidden is ", options.hidden, ", it must be 1 to 65536"));
  }
  switch (options.dtype) {
    case DType::kFloat32:
      return std::make_unique<Mlp<float>>(options);
    case DType::kFloat64:
      return std::make_unique<Mlp<double>>(options);
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("mlp: computes in float32 or float64, not in ", ToString(options.dtype)));
  }
}

}  // namespace evenkeel
