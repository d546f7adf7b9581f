#include "evenkeel/trainer/models/model_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

std::string Path() {
  return testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
}

std::string Bytes(const TensorView& view) {
  return {static_cast<const char*>(view.data), size_t(view.bytes())};
}

TEST(ModelFileTest, RestoresParametersAndBuffers) {
  const std::unique_ptr<Model> saved = *MakeCnn({.widths = {3, 4}, .seed = 1});
  std::ranges::fill(saved->buffers()[1].value.as<float>(), 0.5f);
  ASSERT_TRUE(SaveModel(*saved, Path(), {{"epoch", "3"}}).ok());
  const std::map<std::string, std::string> metadata = {{"epoch", "3"}, {"format", "pt"}};
  EXPECT_EQ(SafetensorsFile::Read(Path())->metadata(), metadata);

  const std::unique_ptr<Model> loaded = *MakeCnn({.widths = {3, 4}, .seed = 2});
  const absl::Status status = LoadModel(Path(), *loaded);
  ASSERT_TRUE(status.ok()) << status;
  for (int i = 0; i < saved->parameters().size(); ++i) {
    EXPECT_EQ(Bytes(loaded->parameters()[i].value), Bytes(saved->parameters()[i].value));
  }
  for (size_t i = 0; i < saved->buffers().size(); ++i) {
    EXPECT_EQ(Bytes(loaded->buffers()[i].value), Bytes(saved->buffers()[i].value));
  }
}

TEST(ModelFileTest, WidensFloat32ForAModelInFloat64) {
  const std::unique_ptr<Model> single = *MakeMlp({.hidden = {3}, .seed = 1});
  const std::unique_ptr<Model> twice =
      *MakeMlp({.hidden = {3}, .dtype = DType::kFloat64, .seed = 2});
  ASSERT_TRUE(SaveModel(*single, Path()).ok());
  ASSERT_TRUE(LoadModel(Path(), *twice).ok());
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(std::ranges::equal(twice->parameters()[i].value.as<double>(),
                                   single->parameters()[i].value.as<float>()));
  }
  // Not the other way: that would lose digits.
  ASSERT_TRUE(SaveModel(*twice, Path()).ok());
  EXPECT_EQ(LoadModel(Path(), *single).message(),
            Path() + ": tensor fc1.weight is float64[3,784], the model has float32[3,784]");
}

TEST(ModelFileTest, Widens16BitsAtAnyAddress) {
  const std::unique_ptr<Model> model = *MakeMlp({.hidden = {3}, .seed = 1});
  const std::vector<BFloat16> ones(784 * 3, BFloat16(1.0f));
  const std::vector<Float16> halves(784 * 3, Float16(0.5f));
  std::string moved_by_one = ".";
  moved_by_one.append(reinterpret_cast<const char*>(ones.data()), 2 * ones.size());
  const absl::string_view odd = absl::string_view(moved_by_one).substr(1);
  const absl::string_view half(reinterpret_cast<const char*>(halves.data()), 2 * halves.size());
  const SafetensorsFile::Tensor tensors[] = {
      {"fc1.weight", DType::kBFloat16, {3, 784}, odd},
      {"fc1.bias", DType::kFloat16, {3}, half.substr(0, 6)},
      {"fc2.weight", DType::kBFloat16, {10, 3}, odd.substr(0, 60)},
      {"fc2.bias", DType::kFloat16, {10}, half.substr(0, 20)}};
  const absl::Status status = LoadModel(tensors, *model);
  ASSERT_TRUE(status.ok()) << status;
  for (int i = 0; i < 4; ++i) {
    const float expected = i % 2 == 0 ? 1.0f : 0.5f;
    EXPECT_EQ(std::ranges::count(model->parameters()[i].value.as<float>(), expected),
              model->parameters()[i].value.count);
  }
}

TEST(ModelFileTest, RefusesAnotherModelsFileAndChangesNothing) {
  const std::unique_ptr<Model> model = *MakeMlp({.hidden = {3}, .seed = 1});
  const std::string before = Bytes(model->parameters()[0].value);

  ASSERT_TRUE(SaveModel(**MakeMlp({.hidden = {4}}), Path()).ok());
  EXPECT_EQ(LoadModel(Path(), *model).message(),
            Path() + ": tensor fc1.weight is float32[4,784], the model has float32[3,784]");
  ASSERT_TRUE(SaveModel(**MakeCnn({}), Path()).ok());
  EXPECT_EQ(LoadModel(Path(), *model).message(), Path() + ": has no tensor fc1.weight");

  std::vector<float> values(784 * 3);
  const auto tensor = [&](const std::string& name, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    return NamedTensor{name, shape, std::span<float>(values).first(count)};
  };
  std::vector<NamedTensor> tensors = {tensor("fc1.weight", {3, 784}), tensor("fc1.bias", {3}),
                                      tensor("fc2.weight", {10, 3}), tensor("fc2.bias", {10})};
  tensors.push_back(tensor("fc3.bias", {2}));
  ASSERT_TRUE(WriteSafetensors(Path(), tensors).ok());
  EXPECT_EQ(LoadModel(Path(), *model).message(),
            Path() + ": has a tensor fc3.bias, which the model does not have");
  EXPECT_EQ(Bytes(model->parameters()[0].value), before);

  tensors.pop_back();
  ASSERT_TRUE(WriteSafetensors(Path(), tensors).ok());
  EXPECT_TRUE(LoadModel(Path(), *model).ok());
}

TEST(ModelFileTest, SaysThatAFileIsMissing) {
  EXPECT_EQ(LoadModel(Path(), **MakeMlp({})).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace evenkeel
