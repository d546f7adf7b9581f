#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/image_dataset.h"

namespace evenkeel {
namespace {

// Image i has label i % 10; its value p is (i + p + p / 1024) % 256, so that the planes differ.
std::string Records(int first, int count) {
  std::string records;
  for (int i = first; i < first + count; ++i) {
    records += static_cast<char>(i % 10);
    for (int p = 0; p < 3072; ++p) records += static_cast<char>(i + p + p / 1024);
  }
  return records;
}

class CifarDatasetTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  std::string Put(const std::string& name, absl::string_view bytes) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary).write(bytes.data(), bytes.size());
    return folder_ + "/" + name;
  }
  void PutAll() const {
    for (int i = 0; i < 5; ++i) Put(absl::StrCat("data_batch_", i + 1, ".bin"), Records(3 * i, 3));
    Put("test_batch.bin", Records(100, 2));
  }

  std::string folder_;
};

TEST_F(CifarDatasetTest, LoadsTheTrainingFilesInOrderAndTheTestFile) {
  EXPECT_FALSE(HasCifar(folder_));
  PutAll();
  EXPECT_TRUE(HasCifar(folder_));
  const auto train = LoadCifar(folder_, Split::kTrain);
  ASSERT_TRUE(train.ok()) << train.status();
  ASSERT_EQ(train->size(), 15);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(train->label(i), i % 10);
  EXPECT_EQ(train->pixels(14)[2], 16);
  const auto test = LoadCifar(folder_, Split::kTest);
  ASSERT_TRUE(test.ok()) << test.status();
  EXPECT_EQ(test->size(), 2);
}

TEST_F(CifarDatasetTest, GathersPlanesAsValueOver255) {
  const ImageDataset data = *ParseCifar(Records(0, 4));
  const std::vector<int32_t> samples = {3, 0};
  BatchMemory memory;
  const auto batch = std::get<ImageBatch>(data.Gather(samples, memory));
  EXPECT_EQ(memory.labels, (std::vector<uint8_t>{3, 0}));
  ASSERT_EQ(batch.images.size(), 2u * 3072);
  for (int p = 0; p < 3072; ++p) {
    ASSERT_EQ(batch.images[p], static_cast<float>((3 + p + p / 1024) % 256) / 255.0f);
    ASSERT_EQ(batch.images[3072 + p], static_cast<float>((p + p / 1024) % 256) / 255.0f);
  }
  EXPECT_TRUE(CheckImages(batch, data.shape().pixels(), kClasses).ok());
}

TEST_F(CifarDatasetTest, SaysWhichFileIsMissingOrDamaged) {
  PutAll();
  std::string bad_label = Records(0, 3);
  bad_label[2 * 3073] = 10;
  const struct {
    std::string contents, message;
  } cases[] = {
      {Records(0, 3).substr(0, 9218),
       "has 9218 bytes, which is not a multiple of the record size, 3073: a label and 32x32 pixels "
       "in 3 "
       "colours"},
      {"x",
       "has 1 bytes, which is not a multiple of the record size, 3073: a label and 32x32 pixels in "
       "3 colours"},
      {"", "is empty"},
      {bad_label, "label 10 of sample 2 is not below 10"},
  };
  for (const auto& c : cases) {
    const std::string path = Put("data_batch_4.bin", c.contents);
    EXPECT_EQ(LoadCifar(folder_, Split::kTrain).status(),
              absl::InvalidArgumentError(absl::StrCat(path, ": ", c.message)));
    EXPECT_EQ(ParseCifar(c.contents).status(), absl::InvalidArgumentError("records: " + c.message));
  }
  std::filesystem::remove(folder_ + "/data_batch_4.bin");
  EXPECT_EQ(LoadCifar(folder_, Split::kTrain).status(),
            absl::NotFoundError(
                "no file data_batch_4.bin in the folder " + folder_ +
                "; CIFAR-10's binary version has data_batch_1.bin to data_batch_5.bin and "
                "test_batch.bin"));
  std::filesystem::create_directories(folder_ + "/data_batch_4.bin");
  EXPECT_EQ(LoadCifar(folder_, Split::kTrain).status(),
            absl::InvalidArgumentError(folder_ + "/data_batch_4.bin is not a regular file"));
}

TEST_F(CifarDatasetTest, OnlyAFlippedLabelCanBeRefused) {
  const std::string good = Records(0, 2);
  for (size_t bit = 0; bit < good.size() * 8; bit += bit < 64 ? 1 : 13) {
    std::string bad = good;
    bad[bit / 8] ^= static_cast<char>(1 << bit % 8);
    const auto data = ParseCifar(bad);
    EXPECT_EQ(data.ok(), bad[0] >= 0 && bad[0] < 10 && bad[3073] >= 0 && bad[3073] < 10) << bit;
  }
  for (size_t bytes = 1; bytes < good.size(); bytes += 97) {
    EXPECT_EQ(ParseCifar(good.substr(0, bytes)).ok(), bytes == 3073) << bytes;
  }
}

TEST(CifarFuzzTest, NoBytesDoHarm) {
  const auto parse = [](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::StatusOr<ImageDataset> data = ParseCifar(std::string(bytes));
    if (!data.ok()) return data.status();
    std::string again;
    for (int64_t i = 0; i < data->size(); ++i) {
      again += static_cast<char>(data->label(i));
      for (uint8_t value : data->pixels(i)) again += static_cast<char>(value);
    }
    return again;
  };
  Fuzz({Records(0, 2), Records(7, 1)}, parse, {.rounds = 3000});
}

}  // namespace
}  // namespace evenkeel
