#include "evenkeel/tools/step/step_model.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/layers/dense.h"
#include "evenkeel/trainer/layers/elementwise.h"
#include "evenkeel/trainer/layers/matrix_product.h"
#include "evenkeel/trainer/layers/softmax_cross_entropy.h"

namespace evenkeel {
namespace {

constexpr int64_t kGptTokens =
    7 * kGptContext;  // 50 ms of arithmetic where a core does 100 GFLOP/s.

// Rows of activations, and their gradient.
struct Activations {
  Activations(int64_t rows, int64_t width)
      : rows(rows), width(width), values(rows * width), diff(rows * width) {}
  int64_t rows, width;
  std::vector<float> values, diff;
};
using ActivationsPtr = std::shared_ptr<Activations>;

// Noise, so that no product meets zeros or denormal numbers.
ActivationsPtr Noise(int64_t rows, int64_t width) {
  auto noise = std::make_shared<Activations>(rows, width);
  std::minstd_rand random(17);
  for (std::vector<float>* part : {&noise->values, &noise->diff}) {
    for (float& x : *part) x = static_cast<float>(random() % 2001) * 1e-3f - 1.0f;
  }
  return noise;
}

// A fully connected layer without a rectifier, or with one.
class Dense : public StepModel::Layer {
 public:
  struct Options {
    int weight, bias;
    bool is_rectified = false, has_input_gradient = true;
  };
  Dense(const StepModel* model, ActivationsPtr from, ActivationsPtr to, const Options& options)
      : model_(model), from_(std::move(from)), to_(std::move(to)), options_(options) {}

  absl::Status Forward() override {
    EK_RETURN_IF_ERROR(DenseForward(products_, Shape(),
                                    options_.is_rectified ? Activation::kRelu : Activation::kNone,
                                    from_->values.data(), model_->Value(options_.weight),
                                    model_->Value(options_.bias), to_->values.data()));
    return absl::OkStatus();
  }
  absl::Status Backward(GradientSink& sink) override {
    if (options_.is_rectified) ReluBackward<float>(to_->values, std::span(to_->diff));
    EK_RETURN_IF_ERROR(sink.Write<float>(options_.bias, [&](GradTarget<float> target) {
      DenseBackwardBias(Shape(), to_->diff.data(), target);
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(sink.Write<float>(options_.weight, [&](GradTarget<float> target) {
      return DenseBackwardWeight(products_, Shape(), from_->values.data(), to_->diff.data(),
                                 target);
    }));
    return options_.has_input_gradient ? InputGradient() : absl::OkStatus();
  }

 protected:
  DenseShape Shape() const { return {from_->rows, from_->width, to_->width}; }
  absl::Status InputGradient() {
    return DenseBackwardInput(products_, Shape(), model_->Value(options_.weight), to_->diff.data(),
                              from_->diff.data());
  }

  MatrixProducts<float> products_;
  const StepModel* const model_;
  const ActivationsPtr from_, to_;
  const Options options_;
};

// The loss at the end of a classifier.
class Loss : public StepModel::Layer {
 public:
  explicit Loss(ActivationsPtr scores) : scores_(std::move(scores)), labels_(scores_->rows) {
    for (size_t i = 0; i < labels_.size(); ++i)
      labels_[i] = static_cast<uint8_t>(i % scores_->width);
  }
  absl::Status Forward() override {
    loss_ = SoftmaxCrossEntropy<float>(scores_->values, labels_, std::span(scores_->diff)).sum;
    return std::isfinite(loss_) ? absl::OkStatus() : absl::InternalError("the loss is not finite");
  }
  absl::Status Backward(GradientSink&) override { return absl::OkStatus(); }

 private:
  const ActivationsPtr scores_;
  std::vector<uint8_t> labels_;
  double loss_ = 0;
};

// A layer norm's work with its parameters.
class Norm : public StepModel::Layer {
 public:
  Norm(const StepModel* model, ActivationsPtr rows, int weight, int bias)
      : model_(model),
        rows_(std::move(rows)),
        product_(rows_->values.size()),
        weight_(weight),
        bias_(bias) {}

  absl::Status Forward() override {
    const float *weight = model_->Value(weight_), *bias = model_->Value(bias_);
    for (int64_t row = 0; row < rows_->rows; ++row) {
      const float* from = rows_->values.data() + row * rows_->width;
      float* to = product_.data() + row * rows_->width;
      for (int64_t i = 0; i < rows_->width; ++i) to[i] = from[i] * weight[i] + bias[i];
    }
    return absl::OkStatus();
  }
  absl::Status Backward(GradientSink& sink) override {
    const DenseShape shape{rows_->rows, 0, rows_->width};
    EK_RETURN_IF_ERROR(sink.Write<float>(bias_, [&](GradTarget<float> target) {
      DenseBackwardBias(shape, rows_->diff.data(), target);
      return absl::OkStatus();
    }));
    return sink.Write<float>(weight_, [&](GradTarget<float> target) {
      for (size_t i = 0; i < product_.size(); ++i) product_[i] = rows_->values[i] * rows_->diff[i];
      DenseBackwardBias(shape, product_.data(), target);
      return absl::OkStatus();
    });
  }

 private:
  const StepModel* const model_;
  const ActivationsPtr rows_;
  std::vector<float> product_;
  const int weight_, bias_;
};

// Embeddings and the scores of the next token, which share a weight: its gradient begins with the
// scores', first in backward, and is final with the embeddings', last.
class Embeddings : public StepModel::Layer {
 public:
  Embeddings(ActivationsPtr rows, int tokens, int positions)
      : rows_(std::move(rows)), tokens_(tokens), positions_(positions) {}

  absl::Status Forward() override { return absl::OkStatus(); }
  absl::Status Backward(GradientSink& sink) override {
    EK_RETURN_IF_ERROR(sink.Write<float>(positions_, [&](GradTarget<float> target) {
      if (!target.add) std::fill_n(target.data, kGptContext * kGptWidth, 0.0f);
      for (size_t i = 0; i < rows_->diff.size(); ++i)
        target.data[i % (kGptContext * kGptWidth)] += rows_->diff[i];
      return absl::OkStatus();
    }));
    const GradTarget<float> target = sink.Target<float>(tokens_);
    if (!target) return absl::OkStatus();
    for (int64_t row = 0; row < rows_->rows; ++row) {
      float* to = target.data + row * 31 % kGptVocabulary * kGptWidth;
      const float* from = rows_->diff.data() + row * kGptWidth;
      for (int64_t i = 0; i < kGptWidth; ++i) to[i] += from[i];
    }
    return sink.Announce(tokens_);
  }

 private:
  const ActivationsPtr rows_;
  const int tokens_, positions_;
};

class TiedScores : public Dense {
 public:
  TiedScores(const StepModel* model, const ActivationsPtr& from, const ActivationsPtr& to,
             int tokens)
      : Dense(model, from, to, {.weight = tokens, .bias = -1}), no_bias_(to->width) {}

  absl::Status Forward() override {
    return DenseForward(products_, Shape(), Activation::kNone, from_->values.data(),
                        model_->Value(options_.weight), no_bias_.data(), to_->values.data());
  }
  absl::Status Backward(GradientSink& sink) override {
    if (const GradTarget<float> target = sink.Target<float>(options_.weight)) {
      EK_RETURN_IF_ERROR(
          DenseBackwardWeight(products_, Shape(), from_->values.data(), to_->diff.data(), target));
    }
    return InputGradient();
  }

 private:
  const std::vector<float> no_bias_;
};

std::unique_ptr<StepModel> MakePerceptron(const std::vector<int64_t>& widths, int64_t samples) {
  std::vector<NamedShape> shapes;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    shapes.push_back({absl::StrCat("fc", i + 1, ".weight"), widths[i + 1], widths[i]});
    shapes.push_back({absl::StrCat("fc", i + 1, ".bias"), 1, widths[i + 1]});
  }
  auto model = std::make_unique<StepModel>(shapes, samples);
  ActivationsPtr from = Noise(samples, widths[0]);
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    auto to = std::make_shared<Activations>(samples, widths[i + 1]);
    const int weight = static_cast<int>(2 * i);
    model->Add(std::make_unique<Dense>(
        model.get(), from, to,
        Dense::Options{weight, weight + 1, /*is_rectified=*/i + 2 < widths.size(),
                       /*has_input_gradient=*/i > 0}));
    from = to;
  }
  model->Add(std::make_unique<Loss>(from));
  return model;
}

std::unique_ptr<StepModel> MakeGpt() {
  auto model = std::make_unique<StepModel>(GptShapes(), kGptTokens / kGptContext);
  StepModel* const m = model.get();
  const auto index = [m](const std::string& name) { return m->parameters().Find(name); };
  const auto noise = [](int64_t width) { return Noise(kGptTokens, width); };
  const auto dense = [&](const std::string& name, int64_t inputs, int64_t outputs) {
    m->Add(std::make_unique<Dense>(m, noise(inputs), noise(outputs),
                                   Dense::Options{index(name + ".weight"), index(name + ".bias")}));
  };
  const auto norm = [&](const std::string& name) {
    m->Add(std::make_unique<Norm>(m, noise(kGptWidth), index(name + ".weight"),
                                  index(name + ".bias")));
  };
  m->Add(std::make_unique<Embeddings>(noise(kGptWidth), index("wte.weight"), index("wpe.weight")));
  for (int layer = 0; layer < kGptLayers; ++layer) {
    const std::string h = absl::StrCat("h.", layer, ".");
    norm(h + "ln_1");
    dense(h + "attn.c_attn", kGptWidth, 3 * kGptWidth);
    dense(h + "attn.c_proj", kGptWidth, kGptWidth);
    norm(h + "ln_2");
    dense(h + "mlp.c_fc", kGptWidth, 4 * kGptWidth);
    dense(h + "mlp.c_proj", 4 * kGptWidth, kGptWidth);
  }
  norm("ln_f");
  m->Add(std::make_unique<TiedScores>(m, noise(kGptWidth), noise(kGptVocabulary),
                                      index("wte.weight")));
  return model;
}

}  // namespace

StepModel::StepModel(const std::vector<NamedShape>& shapes, int64_t samples) : samples_(samples) {
  for (const NamedShape& shape : shapes) {
    values_.emplace_back(shape.count());
    gradients_.emplace_back(shape.count());
    std::minstd_rand random(static_cast<unsigned>(values_.size()));
    const float scale = 1 / std::sqrt(static_cast<float>(shape.columns));
    for (float& x : values_.back())
      x = scale * (static_cast<float>(random() % 2001) * 1e-3f - 1.0f);
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    parameters_.Add(shapes[i].name, absl::MakeSpan(values_[i]), absl::MakeSpan(gradients_[i]));
  }
}

absl::Status StepModel::Forward() {
  for (const std::unique_ptr<Layer>& layer : layers_) EK_RETURN_IF_ERROR(layer->Forward());
  return absl::OkStatus();
}

absl::Status StepModel::Backward(absl::FunctionRef<absl::Status(int)> on_gradient) {
  GradientSink sink(parameters_, on_gradient);
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer)
    EK_RETURN_IF_ERROR((*layer)->Backward(sink));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StepModel>> MakeStepModel(absl::string_view name) {
  if (name == "mlp") return MakePerceptron({784, 1024, 1024, 10}, 64);
  if (name == "tiny") return MakePerceptron({784, 32, 10}, 4);
  if (name == "gpt") return MakeGpt();
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not a model; choose mlp, gpt or tiny"));
}

}  // namespace evenkeel
