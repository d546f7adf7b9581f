#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

// An IDX header of bytes.
std::string Header(std::vector<uint32_t> sizes) {
  std::string header = {'\0', '\0', '\x08', static_cast<char>(sizes.size())};
  for (uint32_t size : sizes) {
    for (int shift : {24, 16, 8, 0}) header += static_cast<char>(size >> shift);
  }
  return header;
}

// Pixel p of image i is (i + p) % 256.
std::string Images(int count) {
  std::string file = Header({static_cast<uint32_t>(count), 28, 28});
  for (int i = 0; i < count; ++i) {
    for (int p = 0; p < 784; ++p) file += static_cast<char>(i + p);
  }
  return file;
}

// Label i is i % 10.
std::string Labels(int count) {
  std::string file = Header({static_cast<uint32_t>(count)});
  for (int i = 0; i < count; ++i) file += static_cast<char>(i % 10);
  return file;
}

class IdxDatasetTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void Put(const std::string& name, absl::string_view bytes) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary).write(bytes.data(), bytes.size());
  }
  void PutGzip(const std::string& name, const std::string& bytes) const {
    gzFile file = gzopen((folder_ + "/" + name).c_str(), "wb");
    gzwrite(file, bytes.data(), bytes.size());
    gzclose(file);
  }

  std::string folder_;
};

TEST_F(IdxDatasetTest, LoadsPlainAndPackedFilesUnderAllTheirNames) {
  PutGzip("train-images-idx3-ubyte.gz", Images(12));
  Put("train-labels-idx1-ubyte", Labels(12));
  Put("t10k-images.idx3-ubyte", Images(3));
  PutGzip("t10k-labels.idx1-ubyte.gz", Labels(3));

  const absl::StatusOr<ImageDataset> train = LoadIdx(folder_, Split::kTrain);
  ASSERT_TRUE(train.ok()) << train.status();
  EXPECT_EQ(train->size(), 12);
  EXPECT_EQ(train->label(11), 1);
  EXPECT_EQ(train->pixels(11).size(), 784u);
  EXPECT_EQ(train->pixels(11)[5], 16);

  const absl::StatusOr<ImageDataset> test = LoadIdx(folder_, Split::kTest);
  ASSERT_TRUE(test.ok()) << test.status();
  EXPECT_EQ(test->size(), 3);
}

TEST_F(IdxDatasetTest, GathersPixelsAsValueOver255) {
  const ImageDataset data = *ParseIdx(Images(12), Labels(12));
  const std::vector<int32_t> samples = {11, 0, 11};
  BatchMemory memory;
  const auto [images, labels] = std::get<ImageBatch>(data.Gather(samples, memory));
  EXPECT_EQ(memory.labels, (std::vector<uint8_t>{1, 0, 1}));
  ASSERT_EQ(labels.size(), 3u);
  ASSERT_EQ(images.size(), 3u * 784);
  for (int p = 0; p < 784; ++p) {
    ASSERT_EQ(images[p], static_cast<float>((11 + p) % 256) / 255.0f);
    ASSERT_EQ(images[784 + p], static_cast<float>(p % 256) / 255.0f);
    ASSERT_EQ(images[2 * 784 + p], images[p]);
  }
}

TEST_F(IdxDatasetTest, NoSamplesAreASmallDataSet) {
  EXPECT_EQ(ParseIdx(Images(0), Labels(0))->size(), 0);
}

TEST_F(IdxDatasetTest, SaysWhichFileIsMissing) {
  EXPECT_EQ(LoadIdx(folder_, Split::kTrain).status(),
            absl::NotFoundError("no file train-images-idx3-ubyte, plain or .gz, in " + folder_));
  Put("train-images-idx3-ubyte", Images(1));
  EXPECT_EQ(LoadIdx(folder_, Split::kTrain).status(),
            absl::NotFoundError("no file train-labels-idx1-ubyte, plain or .gz, in " + folder_));
}

TEST_F(IdxDatasetTest, SaysWhatIsWrongWithAFile) {
  std::string other_magic = Images(2);
  other_magic[2] = '\x0d';
  std::string bad_label = Labels(2);
  bad_label[9] = 10;
  const struct {
    std::string images, labels, message;
  } cases[] = {
      {"", Labels(2), "images: an IDX file's header has 16 bytes, this file has 0"},
      {Images(2).substr(0, 15), Labels(2),
       "images: an IDX file's header has 16 bytes, this file has 15"},
      {other_magic, Labels(2),
       "images: is not an IDX file of bytes in 3 dimensions: it begins with 00000d03, not "
       "00000803"},
      {Labels(20), Labels(2),
       "images: is not an IDX file of bytes in 3 dimensions: it begins with 00000801, not "
       "00000803"},
      {Images(2), Images(2),
       "labels: is not an IDX file of bytes in 1 dimension: it begins with 00000803, not 00000801"},
      {Images(2).substr(0, 1000), Labels(2),
       "images: is too short: 2x28x28 bytes should follow the header, 984 do"},
      {Images(2) + "x", Labels(2),
       "images: is too long: 2x28x28 bytes should follow the header, 1569 do"},
      {Images(2), Labels(2) + "x", "labels: is too long: 2 bytes should follow the header, 3 do"},
      {Images(2), Labels(2).substr(0, 9),
       "labels: is too short: 2 bytes should follow the header, 1 do"},
      {Header({1, 2, 2}) + "abcd", Labels(1),
       "images: holds 1 images of 2x2, but images of 28x28 are expected"},
      {Header({5, 0, 28}), Labels(5),
       "images: holds 5 images of 0x28, but images of 28x28 are expected"},
      {Header({4294967295, 4294967295, 4294967295}), Labels(1),
       "images: is too short: 4294967295x4294967295x4294967295 bytes should follow the header, 0 "
       "do"},
      {Images(2), bad_label, "labels: label 10 of sample 1 is not below 10"},
      {Images(2), Labels(3), "images has 2 images, but labels has 3 labels"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(ParseIdx(c.images, c.labels).status(), absl::InvalidArgumentError(c.message));
  }
}

TEST_F(IdxDatasetTest, NamesThePathOfADamagedFile) {
  Put("train-images-idx3-ubyte", Images(2).substr(0, 500));
  Put("train-labels-idx1-ubyte", Labels(2));
  EXPECT_TRUE(absl::StartsWith(LoadIdx(folder_, Split::kTrain).status().message(),
                               folder_ + "/train-images-idx3-ubyte: is too short"));
  PutGzip("t10k-images-idx3-ubyte.gz", Images(2));
  std::filesystem::resize_file(folder_ + "/t10k-images-idx3-ubyte.gz", 100);
  Put("t10k-labels-idx1-ubyte", Labels(2));
  EXPECT_TRUE(
      absl::StartsWith(LoadIdx(folder_, Split::kTest).status().message(),
                       folder_ + "/t10k-images-idx3-ubyte.gz: the gzip data ends too early"));
}

TEST_F(IdxDatasetTest, RandomBytesAreReadOrRefused) {
  StableRandom random(1);
  const std::string images = Images(3), labels = Labels(3);
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bad_images = images, bad_labels = labels;
    for (std::string* file : {&bad_images, &bad_labels}) {
      for (uint64_t change = random.Below(3); change-- > 0;) {
        switch (random.Below(3)) {
          case 0:
            (*file)[random.Below(std::min<size_t>(file->size(), 20))] =
                static_cast<char>(random.Next());
            break;
          case 1:
            file->resize(1 + random.Below(file->size()));
            break;
          case 2:
            file->append(random.Below(5), 'x');
            break;
        }
      }
    }
    const absl::StatusOr<ImageDataset> data = ParseIdx(bad_images, bad_labels);
    if (!data.ok()) continue;
    ++accepted;
    EXPECT_EQ(data->size(), 3);
  }
  EXPECT_GT(accepted, 200);  // A ninth has no change at all.
}

TEST(FashionMnistTest, LoadsWhereItIsInstalled) {
  if (!std::filesystem::exists(kFashionMnistFolder))
    GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const absl::StatusOr<ImageDataset> train = LoadIdx(kFashionMnistFolder, Split::kTrain);
  ASSERT_TRUE(train.ok()) << train.status();
  EXPECT_EQ(train->size(), 60000);
  std::vector<int> counts(10);
  for (int64_t i = 0; i < train->size(); ++i) ++counts[train->label(i)];
  EXPECT_EQ(counts, std::vector<int>(10, 6000));
  EXPECT_EQ(LoadIdx(kFashionMnistFolder, Split::kTest)->size(), 10000);
}

}  // namespace
}  // namespace evenkeel
