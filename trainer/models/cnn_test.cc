#include "evenkeel/trainer/models/cnn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"

namespace evenkeel {
namespace {

std::unique_ptr<Model> Make(const CnnOptions& options) {
  absl::StatusOr<std::unique_ptr<Model>> model = MakeCnn(options);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

std::vector<std::string> Names(const Model& model) {
  std::vector<std::string> names;
  for (int i = 0; i < model.parameters().size(); ++i) names.push_back(model.parameters()[i].name);
  return names;
}

TEST(CnnTest, HasTheNamesAndShapesOfItsHeader) {
  const std::unique_ptr<Model> model = Make({.widths = {4, 6}});
  EXPECT_EQ(Names(*model),
            (std::vector<std::string>{
                "stem.weight", "block1.norm1.weight", "block1.norm1.bias", "block1.shortcut.weight",
                "block1.conv1.weight", "block1.norm2.weight", "block1.norm2.bias",
                "block1.conv2.weight", "norm.weight", "norm.bias", "fc.weight", "fc.bias"}));
  const std::vector<int64_t> shapes[] = {{4, 1, 3, 3}, {4}, {4},     {6, 4, 1, 1},
                                         {6, 4, 3, 3}, {6}, {6},     {6, 6, 3, 3},
                                         {6},          {6}, {10, 6}, {10}};
  for (int i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(std::ranges::equal(model->shape(i), shapes[i])) << model->parameters()[i].name;
  }
  std::vector<std::string> buffers;
  for (const NamedBuffer& buffer : model->buffers()) {
    buffers.push_back(buffer.name);
    const float expected = buffer.name.ends_with("variance") ? 1 : 0;
    for (float value : buffer.value.as<float>()) EXPECT_EQ(value, expected) << buffer.name;
  }
  EXPECT_EQ(buffers,
            (std::vector<std::string>{"block1.norm1.running_mean", "block1.norm1.running_variance",
                                      "block1.norm2.running_mean", "block1.norm2.running_variance",
                                      "norm.running_mean", "norm.running_variance"}));
}

TEST(CnnTest, OnlyTheFirstBlockOfAStageHasAShortcut) {
  const std::unique_ptr<Model> model = Make({.widths = {4, 6, 5}, .blocks_per_stage = 3});
  std::vector<std::string> shortcuts;
  std::vector<int64_t> inputs;
  for (int i = 0; i < model->parameters().size(); ++i) {
    const std::string& name = model->parameters()[i].name;
    if (name.ends_with("shortcut.weight")) shortcuts.push_back(name);
    if (name.ends_with("conv1.weight")) inputs.push_back(model->shape(i)[1]);
  }
  EXPECT_EQ(inputs, (std::vector<int64_t>{4, 6, 6, 6, 5, 5}));
  EXPECT_EQ(shortcuts,
            (std::vector<std::string>{"block1.shortcut.weight", "block4.shortcut.weight"}));
  EXPECT_EQ(Names(*model).size(), 5u + 6 * 6 + 2);
}

void ExpectThatLossFollowsEachGradient(const CnnOptions& options) {
  const std::unique_ptr<Model> model = Make(options);
  const ParameterSet& parameters = model->parameters();
  const TestBatch batch = StripedImages(16, 3, options.image);
  const auto loss = [&] {
    return model->Forward(batch.images, batch.labels, Mode::kTraining)->loss_mean;
  };
  // Biases lift everything above the rectifiers' bends, so that differences are derivatives.
  for (int i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name.ends_with("bias"))
      std::ranges::fill(parameters[i].value.as<float>(), 4.0f);
  }
  loss();
  ASSERT_TRUE(model->Backward([](int) { return absl::OkStatus(); }).ok());
  for (int i = 0; i < parameters.size(); ++i) {
    const auto value = parameters[i].value.as<float>();
    const std::vector<float> before(value.begin(), value.end());
    const auto gradient = parameters[i].grad.as<float>();
    double norm = 0;
    for (float g : gradient) norm += double{g} * g;
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 0) << parameters[i].name;
    constexpr double kStep = 1e-2;
    double losses[2];
    for (int side : {0, 1}) {
      for (size_t k = 0; k < value.size(); ++k) {
        value[k] = static_cast<float>(before[k] + (side ? kStep : -kStep) * gradient[k] / norm);
      }
      losses[side] = loss();
    }
    std::ranges::copy(before, value.begin());
    // The scores carry rounding of 1e-6, and a norm that follows a bias takes most of its gradient
    // away.
    EXPECT_NEAR((losses[1] - losses[0]) / (2 * kStep), norm, 0.01 * norm + 1e-4)
        << parameters[i].name;
  }
}

TEST(CnnTest, LossFollowsEachGradient) { ExpectThatLossFollowsEachGradient({.widths = {4, 6, 5}}); }

TEST(CnnTest, LossFollowsEachGradientOfADeepNetworkOfColours) {
  ExpectThatLossFollowsEachGradient(
      {.image = {.channels = 3, .side = 32}, .widths = {4, 6}, .blocks_per_stage = 2});
}

TEST(CnnTest, TrainingMovesTheRunningStatisticsOncePerForward) {
  const std::unique_ptr<Model> model = Make({.widths = {4, 6}});
  const TestBatch batch = StripedImages(8, 1);
  const std::span<float> mean = model->buffers()[0].value.as<float>();
  ASSERT_TRUE(model->Forward(batch.images, batch.labels, Mode::kTraining).ok());
  const std::vector<float> once(mean.begin(), mean.end());
  EXPECT_NE(once, std::vector<float>(4));
  ASSERT_TRUE(model->Backward([](int) { return absl::OkStatus(); }).ok());
  EXPECT_EQ(std::vector<float>(mean.begin(), mean.end()), once);
  ASSERT_TRUE(model->Forward(batch.images, batch.labels, Mode::kTraining).ok());
  for (int i = 0; i < 4; ++i)
    EXPECT_NEAR(mean[i], 1.9f * once[i], 1e-6);  // x/10, then 0.9 of it and x/10.
}

TEST(CnnTest, EvaluationAfterManyForwardsIsTraining) {
  // The running statistics converge to the batch's, except for the variance's correction from n to
  // n - 1.
  const std::unique_ptr<Model> model = Make({.widths = {4, 6}});
  const TestBatch batch = StripedImages(32, 1);
  double loss = 0;
  for (int i = 0; i < 200; ++i)
    loss = model->Forward(batch.images, batch.labels, Mode::kTraining)->loss_mean;
  EXPECT_NEAR(model->Forward(batch.images, batch.labels, Mode::kEvaluation)->loss_mean, loss, 1e-3);
}

TEST(CnnTest, ASampleAloneIsEvaluatedAsInItsBatch) {
  const std::unique_ptr<Model> model = Make({});
  const TestBatch batch = StripedImages(5, 1);
  double sum = 0;
  for (int i = 0; i < 5; ++i) {
    sum += model
               ->Forward(std::span(batch.images).subspan(i * kImagePixels, kImagePixels),
                         std::span(batch.labels).subspan(i, 1), Mode::kEvaluation)
               ->loss_mean;
  }
  EXPECT_NEAR(model->Forward(batch.images, batch.labels, Mode::kEvaluation)->loss_mean, sum / 5,
              1e-5);
}

TEST(CnnTest, RefusesImpossibleWidths) {
  EXPECT_EQ(MakeCnn({.widths = {}}).status().message(),
            "cnn: needs 1 to 5 widths of 1 to 1024 channels, got []");
  EXPECT_EQ(MakeCnn({.widths = {8, 0}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeCnn({.widths = {1, 2, 3, 4, 5, 6}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CnnTest, RefusesImpossibleDepthsAndImages) {
  EXPECT_EQ(MakeCnn({.blocks_per_stage = 0}).status().message(),
            "cnn: needs 1 to 32 blocks per stage, got 0");
  EXPECT_EQ(MakeCnn({.blocks_per_stage = 33}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      MakeCnn({.image = {.channels = 0, .side = 28}}).status().message(),
      "cnn: needs images of 1 to 16 channels with a side of 1 to 512, got 0 channels of 28x28");
  EXPECT_EQ(MakeCnn({.image = {.channels = 1, .side = -1}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
