#include "evenkeel/trainer/layers/batch_norm_relu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/layers/testing/layer_test_data.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

struct Shape {
  int batch, channels, side;
  dnnl::memory::format_tag layout;
};
constexpr Shape kShapes[] = {
    {3, 2, 3, dnnl::memory::format_tag::nchw},
    {2, 16, 3, dnnl::memory::format_tag::nChw16c},
    {4, 16, 2, dnnl::memory::format_tag::nhwc},
};

class BatchNormReluTest : public testing::TestWithParam<Shape> {
 protected:
  BatchNormReluTest() {
    // Far from where the rectifier bends, both sides of it, and some channels near it.
    for (size_t i = 0; i < bias_.size(); ++i) bias_[i] += i % 4 == 0 ? 4 : i % 4 == 1 ? -4 : 0;
    for (float& weight : weight_) weight += 1.5f;
  }

  int64_t SamplesPerChannel() const { return int64_t{shape_.batch} * shape_.side * shape_.side; }
  BatchNormState State() {
    return {weight_.data(), bias_.data(), running_mean_.data(), running_variance_.data()};
  }

  template <typename Visit>
  void ForEach(int channel, Visit visit) const {
    const int64_t pixels = shape_.side * shape_.side;
    for (int n = 0; n < shape_.batch; ++n) {
      for (int64_t i = 0; i < pixels; ++i)
        visit((int64_t{n} * shape_.channels + channel) * pixels + i);
    }
  }

  std::vector<double> Means() const {
    std::vector<double> means(shape_.channels);
    for (int c = 0; c < shape_.channels; ++c) {
      ForEach(
          c, [&](int64_t i) { means[c] += source_[i] / static_cast<double>(SamplesPerChannel()); });
    }
    return means;
  }
  std::vector<double> Variances() const {
    const std::vector<double> means = Means();
    std::vector<double> variances(shape_.channels);
    for (int c = 0; c < shape_.channels; ++c) {
      ForEach(c, [&](int64_t i) {
        variances[c] +=
            std::pow(source_[i] - means[c], 2) / static_cast<double>(SamplesPerChannel());
      });
    }
    return variances;
  }
  std::vector<double> Reference(const std::vector<double>& means,
                                const std::vector<double>& variances) const {
    std::vector<double> output(source_.size());
    for (int c = 0; c < shape_.channels; ++c) {
      ForEach(c, [&](int64_t i) {
        const double normed = (source_[i] - means[c]) / std::sqrt(variances[c] + 1e-5);
        output[i] = std::max(0.0, normed * weight_[c] + bias_[c]);
      });
    }
    return output;
  }

  const Shape shape_ = GetParam();
  const OneDnn dnn_;
  const dnnl::memory::desc desc_{{shape_.batch, shape_.channels, shape_.side, shape_.side},
                                 dnnl::memory::data_type::f32,
                                 shape_.layout};
  std::vector<float> source_ = RandomFloats(shape_.channels * SamplesPerChannel(), 1);
  std::vector<float> weight_ = RandomFloats(shape_.channels, 2);
  std::vector<float> bias_ = RandomFloats(shape_.channels, 3);
  std::vector<float> running_mean_ = RandomFloats(shape_.channels, 4);
  std::vector<float> running_variance_ = std::vector<float>(shape_.channels, 2);
};

TEST_P(BatchNormReluTest, TrainingUsesTheBatchAndUpdatesTheRunningStatistics) {
  const std::vector<float> mean_before = running_mean_;
  BatchNormRelu norm(dnn_, desc_, Mode::kTraining);
  const std::vector<float> output =
      ToPlain(dnn_, norm.Forward(ToLayout(dnn_, source_, desc_), State()));
  const std::vector<double> expected = Reference(Means(), Variances());
  for (size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], expected[i], 1e-4) << i;

  const double n = static_cast<double>(SamplesPerChannel());
  for (int c = 0; c < shape_.channels; ++c) {
    EXPECT_NEAR(running_mean_[c], 0.9 * mean_before[c] + 0.1 * Means()[c], 1e-6);
    EXPECT_NEAR(running_variance_[c], 0.9 * 2 + 0.1 * Variances()[c] * n / (n - 1), 1e-6);
  }
}

TEST_P(BatchNormReluTest, EvaluationUsesTheRunningStatisticsAndKeepsThem) {
  const std::vector<float> mean_before = running_mean_;
  BatchNormRelu norm(dnn_, desc_, Mode::kEvaluation);
  const std::vector<float> output =
      ToPlain(dnn_, norm.Forward(ToLayout(dnn_, source_, desc_), State()));
  const std::vector<double> expected =
      Reference({running_mean_.begin(), running_mean_.end()},
                {running_variance_.begin(), running_variance_.end()});
  for (size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], expected[i], 1e-5) << i;
  EXPECT_EQ(running_mean_, mean_before);
  EXPECT_EQ(running_variance_, std::vector<float>(shape_.channels, 2));
}

TEST_P(BatchNormReluTest, GradientsMatchDifferences) {
  BatchNormRelu norm(dnn_, desc_, Mode::kTraining);
  const dnnl::memory source = ToLayout(dnn_, source_, desc_);
  norm.Forward(source, State());
  const std::vector<float> diff_output = RandomFloats(static_cast<int64_t>(source_.size()), 5);
  std::vector<float> diff_weight(weight_.size(), 77);
  std::vector<float> diff_bias(bias_.size(), 5);
  const std::vector<float> diff_source =
      ToPlain(dnn_, norm.Backward(ToLayout(dnn_, diff_output, desc_), {.data = diff_weight.data()},
                                  {.data = diff_bias.data(), .add = true}));
  for (float& value : diff_bias) value -= 5;

  const auto objective = [&] {
    return WeightedSum<double>(Reference(Means(), Variances()),
                               std::vector<double>(diff_output.begin(), diff_output.end()));
  };
  // The step is small, so that hardly an element crosses the rectifier's bend; the reference is in
  // double.
  EXPECT_LT(RelativeError<float>(diff_weight, NumericGradient<float>(weight_, 1e-4, objective)),
            1e-3);
  EXPECT_LT(RelativeError<float>(diff_bias, NumericGradient<float>(bias_, 1e-4, objective)), 1e-3);
  EXPECT_LT(RelativeError<float>(diff_source, NumericGradient<float>(source_, 1e-4, objective)),
            1e-3);
}

TEST_P(BatchNormReluTest, UnwantedGradientsAreNotWritten) {
  BatchNormRelu norm(dnn_, desc_, Mode::kTraining);
  const dnnl::memory source = ToLayout(dnn_, source_, desc_);
  norm.Forward(source, State());
  norm.Backward(source, {}, {});
}

INSTANTIATE_TEST_SUITE_P(Shapes, BatchNormReluTest, testing::ValuesIn(kShapes));

}  // namespace
}  // namespace evenkeel
