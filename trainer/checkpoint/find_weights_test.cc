#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"

namespace evenkeel {
namespace {

class FindWeightsTest : public testing::Test {
 protected:
  FindWeightsTest() { std::filesystem::create_directories(folder_); }
  std::string Touch(const std::string& name) {
    const std::filesystem::path path = std::filesystem::path(folder_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "x";
    return path.string();
  }

  const std::string folder_ =
      testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(FindWeightsTest, AFileIsItself) {
  const std::string file = Touch("any.name");
  EXPECT_EQ(*FindWeights(file), file);
}

TEST_F(FindWeightsTest, AFolderOfOneModelHasItsFile) {
  Touch("step-000000009/model.safetensors");
  EXPECT_EQ(*FindWeights(folder_ + "/step-000000009"),
            folder_ + "/step-000000009/model.safetensors");
  const std::string file = Touch("model.safetensors");
  EXPECT_EQ(*FindWeights(folder_), file);
}

TEST_F(FindWeightsTest, TakesTheNewestCompleteCheckpoint) {
  Touch("step-000000009/model.safetensors");
  const std::string newest = Touch("step-000000120/model.safetensors");
  Touch("step-000000119/model.safetensors");
  Touch("step-000000300/state.rank0.safetensors");  // A file of another kind.
  Touch(".saving-step-000000400/model.safetensors");
  Touch("step-000000500.bad/model.safetensors");
  Touch("step-99999999999999999999/model.safetensors");
  Touch("step--7/model.safetensors");
  Touch("step-");
  Touch("step-000000600");  // No folder.
  EXPECT_EQ(*FindWeights(folder_), newest);
}

TEST_F(FindWeightsTest, SaysWhatItLookedFor) {
  EXPECT_EQ(FindWeights(folder_).status(),
            absl::NotFoundError(
                folder_ +
                ": contains neither model.safetensors nor a checkpoint, step-N/model.safetensors"));
  Touch("pytorch_model.bin");
  EXPECT_TRUE(absl::StrContains(FindWeights(folder_).status().message(),
                                "; pytorch_model.bin is not read: save the model as safetensors"));
  Touch("model.safetensors.index.json");
  EXPECT_TRUE(absl::StrContains(FindWeights(folder_).status().message(),
                                "; it has a model in several safetensors files: save it as one"));
  const absl::Status missing = FindWeights(folder_ + "/nothing").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(missing.message(), folder_ + "/nothing")) << missing;
}

}  // namespace
}  // namespace evenkeel
