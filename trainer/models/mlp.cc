#include "evenkeel/trainer/models/mlp.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/layers/initialize.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/layers/token_loss.h"

namespace evenkeel {
namespace {

// Resizes without the reserve of resize(), which the memory plan does not count. Values are lost.
template <typename T>
void ResizeExactly(std::vector<T>& values, size_t size) {
  if (values.capacity() < size) {
    values.clear();
    values.reserve(size);
  }
  values.resize(size);
}

template <typename T>
class Mlp : public Model {
 public:
  explicit Mlp(const MlpOptions& options)
      : Model(options.is_plan), pixels_(options.image.pixels()) {
    int inputs = pixels_;
    for (int units : options.hidden) inputs = AddLayer(inputs, units, options.seed);
    AddLayer(inputs, kClasses, options.seed);
  }

  int64_t ActivationBytes() const override {
    size_t elements = converted_images_.capacity();
    for (const Layer& layer : layers_) elements += layer.output.capacity() + layer.diff.capacity();
    return static_cast<int64_t>(elements * sizeof(T)) + planned_;
  }

  absl::Status PlanPass(int64_t samples, Mode mode) override {
    int64_t units = std::is_same_v<T, float> ? 0 : pixels_;
    for (const Layer& layer : layers_) {
      const bool has_diff = mode == Mode::kTraining && &layer != &layers_.back();
      units += layer.outputs * (has_diff ? 2 : 1);
    }
    planned_ = std::max(planned_, samples * units * static_cast<int64_t>(sizeof(T)));
    return absl::OkStatus();
  }

 private:
  struct Layer {
    int64_t inputs;
    int64_t outputs;
    int weight;
    int bias;
    // [batch, outputs], after the rectifier; of the last layer the scores.
    std::vector<T> output = {};
    std::vector<T> diff = {};  // Its gradient, before the rectifier; unused in the last layer.
  };

  // Returns the number of inputs of the next layer.
  int AddLayer(int inputs, int outputs, uint64_t seed) {
    const std::string name = absl::StrCat("fc", layers_.size() + 1);
    const Layer& layer = layers_.emplace_back(
        Layer{.inputs = inputs,
              .outputs = outputs,
              .weight = AddParameter(name + ".weight", DTypeOf<T>::value, {outputs, inputs}),
              .bias = AddParameter(name + ".bias", DTypeOf<T>::value, {outputs})});
    for (int index : {layer.weight, layer.bias}) {
      FillUniform(this->template Initial<T>(index), 1 / std::sqrt(inputs),
                  StableRandom(seed, index));
    }
    return outputs;
  }

  const T* Value(int index) const { return static_cast<const T*>(parameters()[index].value.data); }
  LinearShape ShapeOf(const Layer& layer) const {
    return LinearShape::FromOutputs(batch_, layer.inputs, layer.outputs);
  }

  absl::Status Check(const Batch& batch) const override {
    return CheckImages(batch, pixels_, kClasses).status();
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode,
                                          const PassOptions& options) override {
    const auto& [images, labels] = std::get<ImageBatch>(batch);
    batch_ = static_cast<int64_t>(labels.size());
    const T* input = images_ = InOwnPrecision(images);
    for (Layer& layer : layers_) {
      ResizeExactly(layer.output, batch_ * layer.outputs);
      EK_RETURN_IF_ERROR(products_.Run(
          ShapeOf(layer).BackwardInput(), input, Value(layer.weight), Value(layer.bias),
          layer.output.data(), &layer == &layers_.back() ? Activation::kNone : Activation::kRelu));
      input = layer.output.data();
    }
    // The scores' gradient takes their place: it is all that Backward needs of them.
    std::vector<T>& scores = layers_.back().output;
    const auto samples = static_cast<double>(batch_);
    const TokenLossResult loss =
        TokenLoss<T, T, uint8_t>(kClasses, scores.data(), labels, options.weight / samples,
                                 mode == Mode::kTraining ? scores.data() : nullptr);
    return BatchResult{.loss_mean = loss.sum / samples, .correct = loss.correct};
  }

  const T* InOwnPrecision(std::span<const float> images) {
    if constexpr (std::is_same_v<T, float>) {
      return images.data();
    } else {
      converted_images_.assign(images.begin(), images.end());
      return converted_images_.data();
    }
  }

  absl::Status DoBackward(GradientSink& sink) override {
    const T* diff = layers_.back().output.data();
    for (size_t i = layers_.size(); i-- > 0;) {
      const Layer& layer = layers_[i];
      const LinearShape shape = ShapeOf(layer);
      EK_RETURN_IF_ERROR(sink.Write<T>(layer.bias, [&](GradTarget<T> target) {
        SumRows(batch_, layer.outputs, diff, target);
        return absl::OkStatus();
      }));
      const T* input = i > 0 ? layers_[i - 1].output.data() : images_;
      EK_RETURN_IF_ERROR(sink.Write<T>(layer.weight, [&](GradTarget<T> target) {
        return products_.Run(shape.BackwardWeight(target.add), diff, input, nullptr, target.data);
      }));
      if (!sink.AnyTrainedBefore(layer.weight)) return absl::OkStatus();

      Layer& below = layers_[i - 1];
      ResizeExactly(below.diff, below.output.size());
      EK_RETURN_IF_ERROR(
          products_.Run(shape.Forward(), diff, Value(layer.weight), nullptr, below.diff.data()));
      ReluBackward<T>(below.output, below.diff);
      diff = below.diff.data();
    }
    return absl::OkStatus();
  }

  const int pixels_;
  std::vector<Layer> layers_;
  MatrixProducts<T> products_;

  int64_t planned_ = 0;  // Bytes of the passes of a plan.
  int64_t batch_ = 0;
  const T* images_ = nullptr;        // [batch, pixels]
  std::vector<T> converted_images_;  // Unused in float32.
};

int64_t ParametersOf(const MlpOptions& options) {
  int64_t count = 0, inputs = options.image.pixels();
  for (const int64_t units : options.hidden) count += (std::exchange(inputs, units) + 1) * units;
  return count + (inputs + 1) * kClasses;
}

absl::StatusOr<std::unique_ptr<Model>> Make(const MlpOptions& options) {
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

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeMlp(const MlpOptions& options) {
  const auto is_possible = [](int units) { return units >= 1 && units <= MlpOptions::kMaxUnits; };
  if (options.hidden.empty() || options.hidden.size() > MlpOptions::kMaxLayers ||
      !std::ranges::all_of(options.hidden, is_possible)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mlp: needs 1 to ", MlpOptions::kMaxLayers, " hidden layers of 1 to ",
        MlpOptions::kMaxUnits, " units, got [", absl::StrJoin(options.hidden, ","), "]"));
  }
  return IfMemoryAllows(absl::StrCat("mlp: not enough memory for ", ParametersOf(options),
                                     " parameters and their gradients"),
                        [&] { return Make(options); });
}

}  // namespace evenkeel
