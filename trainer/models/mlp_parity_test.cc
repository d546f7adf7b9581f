// The perceptron against runs of PyTorch: five steps in one process, with plain optimizers written
// here.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

constexpr int kSteps = 5;
constexpr int kBatch = 8;

struct ParameterNames {
  const char* ours;
  const char* recorded;
};
constexpr ParameterNames kNames[] = {{"fc1.weight", "0.weight"},
                                     {"fc1.bias", "0.bias"},
                                     {"fc2.weight", "2.weight"},
                                     {"fc2.bias", "2.bias"}};

absl::StatusOr<SafetensorsFile> Open(const std::string& name) {
  return SafetensorsFile::Read("tests/testdata/train/" + name + ".safetensors");
}

// The elements of a stored tensor; empty if there is none, or it has another type.
template <typename T>
std::vector<T> Elements(const SafetensorsFile& file, const std::string& name) {
  const auto* tensor = file.Find(name);
  if (tensor == nullptr || tensor->dtype != DTypeOf<T>::value) return {};
  std::vector<T> values(tensor->count());
  std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

struct Optimizer {
  std::string name;
  double lr, momentum, decay;
};
const Optimizer kOptimizers[] = {
    {"sgd", 0.05, 0.9, 0},
    {"adam", 1e-3, 0, 0},
    {"adamw", 1e-3, 0, 0.01},
};

// One update of one parameter, as PyTorch 1.13 orders the operations.
template <typename T>
struct Updater {
  std::vector<T> first, second;  // Momentum, or the two moments.

  void Sgd(const Optimizer& optimizer, int step, std::span<T> value, std::span<const T> gradient) {
    first.resize(value.size());
    for (size_t i = 0; i < value.size(); ++i) {
      first[i] =
          step == 0 ? gradient[i] : static_cast<T>(optimizer.momentum) * first[i] + gradient[i];
      value[i] -= static_cast<T>(optimizer.lr) * first[i];
    }
  }

  void Adam(const Optimizer& optimizer, int step, std::span<T> value, std::span<const T> gradient) {
    constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;
    first.resize(value.size());
    second.resize(value.size());
    const T step_size = static_cast<T>(optimizer.lr / (1 - std::pow(kBeta1, step + 1)));
    const T correction = static_cast<T>(std::sqrt(1 - std::pow(kBeta2, step + 1)));
    for (size_t i = 0; i < value.size(); ++i) {
      value[i] *= static_cast<T>(1 - optimizer.lr * optimizer.decay);
      first[i] = static_cast<T>(kBeta1) * first[i] + static_cast<T>(1 - kBeta1) * gradient[i];
      second[i] = static_cast<T>(kBeta2) * second[i] +
                  static_cast<T>(1 - kBeta2) * gradient[i] * gradient[i];
      value[i] -=
          step_size * first[i] / (std::sqrt(second[i]) / correction + static_cast<T>(kEpsilon));
    }
  }

  void Update(const Optimizer& optimizer, int step, std::span<T> value,
              std::span<const T> gradient) {
    optimizer.name == "sgd" ? Sgd(optimizer, step, value, gradient)
                            : Adam(optimizer, step, value, gradient);
  }
};

// Our run of the recorded steps.
template <typename T>
class RecordedSteps {
 public:
  absl::Status Start() {
    EK_ASSIGN_OR_RETURN(const SafetensorsFile inputs, Open("mlp"));
    EK_ASSIGN_OR_RETURN(model_, MakeMlp({.hidden = {64}, .dtype = DTypeOf<T>::value}));
    for (const ParameterNames& names : kNames) {
      std::ranges::copy(Elements<float>(inputs, absl::StrCat("init.", names.recorded)),
                        Value(names.ours).begin());
    }
    images_ = Elements<float>(inputs, "x.rank0");
    for (int64_t label : Elements<int64_t>(inputs, "y.rank0"))
      labels_.push_back(static_cast<uint8_t>(label));
    return absl::OkStatus();
  }

  std::span<T> Value(const std::string& name) {
    return model_->parameters()[model_->parameters().Find(name)].value.template as<T>();
  }

  absl::StatusOr<double> Step(const Optimizer& optimizer, int step) {
    ParameterSet& parameters = model_->parameters();
    parameters.ClearGradients();
    EK_ASSIGN_OR_RETURN(
        const BatchResult result,
        model_->Forward(
            std::span(images_).subspan(step * kBatch * kImagePixels, kBatch * kImagePixels),
            std::span(labels_).subspan(step * kBatch, kBatch), Mode::kTraining));
    EK_RETURN_IF_ERROR(model_->Backward([](int) { return absl::OkStatus(); }));
    for (int i = 0; i < parameters.size(); ++i) {
      updaters_[i].Update(optimizer, step, parameters[i].value.as<T>(), parameters[i].grad.as<T>());
    }
    return result.loss_mean;
  }

 private:
  std::unique_ptr<Model> model_;
  std::vector<float> images_;
  std::vector<uint8_t> labels_;
  std::map<int, Updater<T>> updaters_;  // By parameter.
};

class MlpParityTest : public testing::TestWithParam<Optimizer> {
 protected:
  // The largest difference that the recording's README allows.
  static std::map<std::string, double> Bounds(const SafetensorsFile& recorded,
                                              const std::string& optimizer) {
    const auto json = nlohmann::json::parse(recorded.metadata().at("max_abs_diff_vs_float64"));
    std::map<std::string, double> bounds;
    for (const ParameterNames& names : kNames) {
      bounds[names.recorded] =
          optimizer == "sgd" ? 1e-6 : 3 * json.at(names.recorded).get<double>();
    }
    return bounds;
  }

  template <typename T>
  void ExpectParity() {
    const Optimizer& optimizer = GetParam();
    const absl::StatusOr<SafetensorsFile> recorded = Open("mlp.single." + optimizer.name);
    ASSERT_TRUE(recorded.ok()) << recorded.status();
    const std::map<std::string, double> bounds = Bounds(*recorded, optimizer.name);
    const std::vector<double> losses = Elements<double>(*recorded, "loss.rank0");
    ASSERT_EQ(losses.size(), kSteps);

    RecordedSteps<T> run;
    const absl::Status started = run.Start();
    ASSERT_TRUE(started.ok()) << started;
    for (int step = 0; step < kSteps; ++step) {
      const absl::StatusOr<double> loss = run.Step(optimizer, step);
      ASSERT_TRUE(loss.ok()) << loss.status();
      EXPECT_NEAR(*loss, losses[step], 1e-6) << "step " << step;
      for (const ParameterNames& names : kNames) {
        const std::vector<float> samples =
            Elements<float>(*recorded, absl::StrCat("sample.", names.recorded));
        const std::span<const T> value = run.Value(names.ours);
        const size_t stride = std::max<size_t>(1, value.size() / 64);
        const size_t per_step = samples.size() / kSteps;
        ASSERT_GE(per_step, 10u);
        double difference = 0;
        for (size_t k = 0; k < per_step; ++k) {
          difference = std::max<double>(difference,
                                        std::abs(value[k * stride] - samples[step * per_step + k]));
        }
        EXPECT_LE(difference, bounds.at(names.recorded)) << names.ours << " after step " << step;
        double squares = 0;
        for (T element : value) squares += double{element} * element;
        EXPECT_NEAR(std::sqrt(squares),
                    Elements<double>(*recorded, absl::StrCat("norm2.", names.recorded))[step],
                    1e-5);
      }
    }
  }
};

TEST_P(MlpParityTest, Float32AgreesWithPyTorch) { ExpectParity<float>(); }

TEST_P(MlpParityTest, Float64AgreesWithPyTorch) { ExpectParity<double>(); }

INSTANTIATE_TEST_SUITE_P(Optimizers, MlpParityTest, testing::ValuesIn(kOptimizers),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel
