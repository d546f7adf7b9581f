#include "evenkeel/zero_optim/checkpoint/parameter_file.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace evenkeel {
namespace {

std::string Path() {
  return testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
}

// A tied table, a vector without a shape, and statistics beside them.
struct Example {
  std::vector<float> table, bias, mean;
  ParameterSet params;
  std::vector<NamedTensor> buffers;

  explicit Example(float first) : table{first, 2, 3, 4, 5, 6}, bias{7, 8}, mean{first + 9, 10} {
    params.Add("embedding", absl::MakeSpan(table), {}, {3, 2});
    params.Add("head", absl::MakeSpan(table), {}, {3, 2});
    params.Add("bias", absl::MakeSpan(bias));
    buffers = {{"norm.mean", {2}, absl::MakeSpan(mean)}};
  }
};

TEST(ParameterFileTest, RestoresValuesAndBuffers) {
  const Example saved(1);
  absl::Status status =
      SaveParameters(saved.params, Path(), {.buffers = saved.buffers, .metadata = {{"step", "7"}}});
  ASSERT_TRUE(status.ok()) << status;
  const SafetensorsFile file = *SafetensorsFile::Read(Path());
  EXPECT_EQ(file.tensors().size(), 3u);  // The shared one once.
  EXPECT_EQ(file.Find("embedding")->shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(file.Find("bias")->shape, std::vector<int64_t>{2});
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"step", "7"}}));

  Example loaded(0);
  loaded.bias = {0, 0};
  status = LoadParameters(Path(), loaded.params, {.buffers = loaded.buffers});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(loaded.table, saved.table);
  EXPECT_EQ(loaded.bias, saved.bias);
  EXPECT_EQ(loaded.mean, saved.mean);
}

TEST(ParameterFileTest, AnotherModelsFileChangesNothing) {
  const Example saved(1);
  ASSERT_TRUE(SaveParameters(saved.params, Path()).ok());
  Example other(0);
  EXPECT_EQ(LoadParameters(Path(), other.params, {.buffers = other.buffers}).message(),
            Path() + ": has no tensor norm.mean");
  EXPECT_EQ(other.table[0], 0);
}

TEST(ParameterFileTest, ValuesOnADeviceAreRefused) {
  float value = 0;
  ParameterSet params;
  params.Add("weight", TensorView(&value, 1, DType::kFloat32, Device::Cuda(1)));
  EXPECT_EQ(SaveParameters(params, Path()),
            absl::InvalidArgumentError("tensor weight is on cuda:1; copy it to the host first"));
  const TensorView copy(&value, 1, DType::kFloat32);
  EXPECT_TRUE(SaveParameters(params, Path(), {.values = {&copy, 1}}).ok());
}

}  // namespace
}  // namespace evenkeel
