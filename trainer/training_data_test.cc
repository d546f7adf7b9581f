#include "evenkeel/trainer/training_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

void WriteSplit(const std::string& folder, const std::string& split, int count) {
  std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  mkdir(folder.c_str(), 0755);
  std::ofstream(folder + "/" + split + "-images-idx3-ubyte") << images << std::string(count * 784, 0);
  std::ofstream(folder + "/" + split + "-labels-idx1-ubyte") << labels << std::string(count, 0);
}

TEST(LoadTrainingDataTest, LoadsBothSplits) {
  const std::string folder = testing::TempDir() + "/both";
  WriteSplit(folder, "train", 3);
  WriteSplit(folder, "t10k", 2);
  const auto data = LoadTrainingData(folder);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train->size(), 3);
  EXPECT_EQ((*data)->test->size(), 2);
}

TEST(LoadTrainingDataTest, RefusesAnEmptySplitAndAMissingOne) {
  const std::string folder = testing::TempDir() + "/empty";
  WriteSplit(folder, "train", 3);
  EXPECT_TRUE(absl::IsNotFound(LoadTrainingData(folder).status()));
  WriteSplit(folder, "t10k", 0);
  const absl::Status status = LoadTrainingData(folder).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(folder));
}

}  // namespace
}  // namespace evenkeel
