#include "evenkeel/trainer/layers/residual_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/layers/testing/layer_test_data.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

constexpr ResidualBlockShape kShapes[] = {
    {.batch = 3, .inputs = 2, .outputs = 3, .side = 5, .stride = 2},
    {.batch = 4,
     .inputs = 3,
     .outputs = 3,
     .side = 3,
     .stride = 1},  // The skip is the source itself.
    {.batch = 2, .inputs = 16, .outputs = 16, .side = 3, .stride = 1},
};

class ResidualBlockTest : public testing::TestWithParam<ResidualBlockShape> {
 protected:
  ResidualBlockTest() {
    indices_.norm1 = AddNorm("norm1", shape_.inputs);
    if (shape_.changes_size()) indices_.shortcut = Add("shortcut", shape_.outputs * shape_.inputs);
    indices_.conv1 = Add("conv1", shape_.outputs * shape_.inputs * 9);
    indices_.norm2 = AddNorm("norm2", shape_.outputs);
    indices_.conv2 = Add("conv2", shape_.outputs * shape_.outputs * 9);
    block_.emplace(dnn_, shape_, indices_, source_desc_, Mode::kTraining);
  }

  int Add(const std::string& name, int count, float shift = 0) {
    const TensorView value = memory_.Allocate(DType::kFloat32, count);
    std::ranges::transform(RandomFloats(count, parameters_.size() + 10), value.as<float>().begin(),
                           [&](float random) { return random * 0.5f + shift; });
    return parameters_.Add(name, value, memory_.Allocate(DType::kFloat32, count));
  }

  BatchNormIndices AddNorm(const std::string& name, int channels) {
    BatchNormIndices norm;
    norm.weight = Add(name + ".weight", channels, 1);
    norm.bias = Add(name + ".bias", channels,
                    4);  // Above the rectifier's bend, so that differences are derivatives.
    norm.running_mean = memory_.Allocate(DType::kFloat32, channels).as<float>().data();
    norm.running_variance = memory_.Allocate(DType::kFloat32, channels).as<float>().data();
    return norm;
  }

  absl::StatusOr<dnnl::memory> Backward(const std::vector<float>& diff_output) {
    announced_.clear();
    const auto on_gradient = [&](int index) {
      announced_.push_back(index);
      return absl::OkStatus();
    };
    GradientSink sink(parameters_, on_gradient);
    return block_->Backward(ToLayout(dnn_, diff_output, block_->output_desc()), sink);
  }

  std::vector<float> Forward() {
    const dnnl::memory source = ToLayout(dnn_, source_, source_desc_);
    last_source_ = source;  // Backward reads it.
    return ToPlain(dnn_, block_->Forward(source, parameters_));
  }

  std::span<float> Values(int index) { return parameters_[index].value.as<float>(); }
  std::span<float> Gradient(int index) { return parameters_[index].grad.as<float>(); }

  const ResidualBlockShape shape_ = GetParam();
  const OneDnn dnn_;
  const dnnl::memory::desc source_desc_ =
      PlainDesc({shape_.batch, shape_.inputs, shape_.side, shape_.side});
  TensorMemory memory_;
  ParameterSet parameters_;
  ResidualBlockIndices indices_;
  std::vector<float> source_ =
      RandomFloats(shape_.batch * shape_.inputs * shape_.side * shape_.side, 1);
  std::optional<ResidualBlock> block_;
  dnnl::memory last_source_;
  std::vector<int> announced_;
};

TEST_P(ResidualBlockTest, GradientsMatchDifferences) {
  const std::vector<float> diff_output = RandomFloats(static_cast<int64_t>(Forward().size()), 5);
  const absl::StatusOr<dnnl::memory> diff_source = Backward(diff_output);
  ASSERT_TRUE(diff_source.ok()) << diff_source.status();
  const std::vector<float> diff_source_plain = ToPlain(dnn_, *diff_source);

  // The objective is as rough as float32: 1e-5 in each, divided by the step.
  constexpr double kStep = 1e-2, kTolerance = 0.01;
  const auto objective = [&] { return WeightedSum<float>(Forward(), diff_output); };
  EXPECT_LT(
      RelativeError<float>(diff_source_plain, NumericGradient<float>(source_, kStep, objective)),
      kTolerance);
  for (int i = 0; i < parameters_.size(); ++i) {
    EXPECT_LT(
        RelativeError<float>(Gradient(i), NumericGradient<float>(Values(i), kStep, objective)),
        kTolerance)
        << parameters_[i].name;
  }
}

TEST_P(ResidualBlockTest, AnnouncesFromTheLastToTheFirst) {
  ASSERT_TRUE(Backward(RandomFloats(static_cast<int64_t>(Forward().size()), 5)).ok());
  ASSERT_EQ(announced_.size(), parameters_.size());
  for (size_t i = 0; i < announced_.size(); ++i)
    EXPECT_EQ(announced_[i], parameters_.size() - 1 - static_cast<int>(i));
}

TEST_P(ResidualBlockTest, StopsBelowTheLowestTrainedParameter) {
  const std::vector<float> diff_output = RandomFloats(static_cast<int64_t>(Forward().size()), 5);
  ASSERT_TRUE(Backward(diff_output).ok());
  std::vector<std::vector<float>> all;
  for (int i = 0; i < parameters_.size(); ++i)
    all.emplace_back(Gradient(i).begin(), Gradient(i).end());

  for (int lowest = 1; lowest < parameters_.size(); ++lowest) {
    SCOPED_TRACE(lowest);
    parameters_.SetTrainable(lowest - 1, false);
    for (int i = 0; i < parameters_.size(); ++i) std::ranges::fill(Gradient(i), 77.0f);
    parameters_.ClearGradients();
    Forward();
    const absl::StatusOr<dnnl::memory> diff_source = Backward(diff_output);
    ASSERT_TRUE(diff_source.ok());
    EXPECT_EQ(!*diff_source, lowest > indices_.norm1.bias);
    for (int i = 0; i < parameters_.size(); ++i) {
      EXPECT_EQ(std::vector<float>(Gradient(i).begin(), Gradient(i).end()),
                i < lowest ? std::vector<float>(all[i].size(), 77.0f) : all[i])
          << parameters_[i].name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ResidualBlockTest, testing::ValuesIn(kShapes));

}  // namespace
}  // namespace evenkeel
