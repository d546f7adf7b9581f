#include "evenkeel/trainer/models/mlp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"

namespace evenkeel {
namespace {

std::unique_ptr<Model> Make(const MlpOptions& options) {
  absl::StatusOr<std::unique_ptr<Model>> model = MakeMlp(options);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

absl::Status Step(Model& model, const TestBatch& batch) {
  model.parameters().ClearGradients();
  if (auto result = model.Forward(batch.images, batch.labels, Mode::kTraining); !result.ok())
    return result.status();
  return model.Backward([](int) { return absl::OkStatus(); });
}

TEST(MlpTest, HasTheNamesAndShapesOfItsHeader) {
  const std::unique_ptr<Model> model = Make({.hidden = {12, 20}});
  const struct {
    std::string name;
    std::vector<int64_t> shape;
    double limit;
  } expected[] = {
      {"fc1.weight", {12, 784}, 1 / 28.0},           {"fc1.bias", {12}, 1 / 28.0},
      {"fc2.weight", {20, 12}, 1 / std::sqrt(12.0)}, {"fc2.bias", {20}, 1 / std::sqrt(12.0)},
      {"fc3.weight", {10, 20}, 1 / std::sqrt(20.0)}, {"fc3.bias", {10}, 1 / std::sqrt(20.0)},
  };
  ASSERT_EQ(model->parameters().size(), 6);
  EXPECT_TRUE(model->buffers().empty());
  for (int i = 0; i < 6; ++i) {
    const Parameter& parameter = model->parameters()[i];
    EXPECT_EQ(parameter.name, expected[i].name);
    EXPECT_TRUE(std::ranges::equal(model->shape(i), expected[i].shape));
    double highest = 0;
    for (float value : parameter.value.as<float>())
      highest = std::max<double>(highest, std::abs(value));
    EXPECT_LE(highest, expected[i].limit * 1.0000001);
    EXPECT_GT(highest, expected[i].limit * 0.6);
  }
}

TEST(MlpTest, GradientsMatchDifferencesInFloat64) {
  const std::unique_ptr<Model> model = Make({.hidden = {3, 4}, .dtype = DType::kFloat64});
  const TestBatch batch = StripedImages(4, 1);
  ASSERT_TRUE(Step(*model, batch).ok());
  for (int i = 0; i < model->parameters().size(); ++i) {
    const Parameter& parameter = model->parameters()[i];
    const auto numeric = NumericGradient<double>(parameter.value.as<double>(), 1e-6, [&] {
      return model->Forward(batch.images, batch.labels, Mode::kTraining)->loss_mean;
    });
    EXPECT_LT(RelativeError<double>(parameter.grad.as<double>(), numeric), 1e-6) << parameter.name;
  }
}

TEST(MlpTest, Float32IsTheRoundedFloat64) {
  const std::unique_ptr<Model> single = Make({.hidden = {33, 20}, .seed = 5});
  const std::unique_ptr<Model> twice =
      Make({.hidden = {33, 20}, .dtype = DType::kFloat64, .seed = 5});
  const TestBatch batch = StripedImages(20, 1);
  const BatchResult result = *single->Forward(batch.images, batch.labels, Mode::kEvaluation);
  const BatchResult expected = *twice->Forward(batch.images, batch.labels, Mode::kEvaluation);
  EXPECT_NEAR(result.loss_mean, expected.loss_mean, 1e-6);
  EXPECT_EQ(result.correct, expected.correct);
  ASSERT_TRUE(Step(*single, batch).ok());
  ASSERT_TRUE(Step(*twice, batch).ok());
  for (int i = 0; i < 6; ++i) {
    const auto doubles = twice->parameters()[i].grad.as<double>();
    EXPECT_LT(RelativeError<float>(single->parameters()[i].grad.as<float>(),
                                   {doubles.begin(), doubles.end()}),
              1e-5);
  }
}

TEST(MlpTest, RefusesImpossibleOptions) {
  for (const std::vector<int>& hidden :
       {std::vector<int>{}, {0}, {8, 65537}, std::vector<int>(17, 1)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(MakeMlp({.hidden = hidden}).status()));
  }
  EXPECT_EQ(MakeMlp({.hidden = {8, 0}}).status().message(),
            "mlp: needs 1 to 16 hidden layers of 1 to 65536 units, got [8,0]");
  EXPECT_EQ(MakeMlp({.dtype = DType::kInt8}).status().message(),
            "mlp: computes in float32 or float64, not in int8");
}

}  // namespace
}  // namespace evenkeel
