#include "evenkeel/trainer/data/training_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/sampler.h"

namespace evenkeel {
namespace {

std::string NewFolder(const std::string& name) {
  const std::string folder = testing::TempDir() + "/" + name;
  mkdir(folder.c_str(), 0755);
  return folder;
}

void WriteSplit(const std::string& folder, const std::string& split, int count) {
  std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  std::ofstream(folder + "/" + split + "-images-idx3-ubyte")
      << images << std::string(count * 784, 0);
  std::ofstream(folder + "/" + split + "-labels-idx1-ubyte") << labels << std::string(count, 0);
}

void WriteCifar(const std::string& folder) {
  for (const char* name :
       {"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"}) {
    std::ofstream(absl::StrCat(folder, "/", name, ".bin")) << std::string(2 * 3073, '\7');
  }
  std::ofstream(folder + "/test_batch.bin") << std::string(3073, '\7');
}

// A shard of `count` tokens `token`.
void WriteShard(const std::string& path, int count, char token) {
  std::string file(1024 + 2 * count, '\0');
  const std::vector<char> header = {
      '\x88', '\xd8', '\x34', '\x01', 1, 0, 0, 0, static_cast<char>(count)};
  std::copy(header.begin(), header.end(), file.begin());
  for (int i = 0; i < count; ++i) file[1024 + 2 * i] = token;
  std::ofstream(path) << file;
}

int32_t FirstToken(const Dataset& data) {
  BatchMemory memory;
  return std::get<TokenBatch>(data.Gather(InOrder(1), memory)).inputs[0];
}

TEST(LoadTrainingDataTest, LoadsMnist) {
  const std::string folder = NewFolder("both");
  WriteSplit(folder, "train", 3);
  WriteSplit(folder, "t10k", 2);
  for (const auto& data : {LoadTrainingData({.path = folder}),
                           LoadTrainingData({.path = folder, .kind = DataKind::kIdx})}) {
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ((*data)->train->size(), 3);
    EXPECT_EQ((*data)->test->size(), 2);
    EXPECT_EQ((*data)->image, (ImageShape{.channels = 1, .side = 28}));
    EXPECT_EQ((*data)->vocabulary, 0);
  }
}

TEST(LoadTrainingDataTest, SizesComeWithoutTheImages) {
  const std::string folder = NewFolder("sizes");
  WriteSplit(folder, "train", 5);
  WriteSplit(folder, "t10k", 3);
  const auto all = LoadTrainingData({.path = folder});
  // Only the ranks read the images, which are damaged.
  std::filesystem::resize_file(folder + "/train-images-idx3-ubyte", 100);
  const auto sizes = LoadTrainingData({.path = folder}, Contents::kSizes);
  ASSERT_TRUE(all.ok() && sizes.ok()) << all.status() << sizes.status();
  EXPECT_EQ((*sizes)->train->size(), 5);
  EXPECT_EQ((*sizes)->test->size(), 3);
  EXPECT_EQ((*sizes)->train->held_bytes(), (*all)->train->held_bytes());
  EXPECT_EQ((*all)->train->held_bytes(), 16 + 5 * 784 + 5);
  EXPECT_FALSE(LoadTrainingData({.path = folder}).ok());
}

TEST(LoadTrainingDataTest, LoadsCifar) {
  const std::string folder = NewFolder("cifar");
  WriteCifar(folder);
  const auto data = LoadTrainingData({.path = folder});
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train->size(), 10);
  EXPECT_EQ((*data)->test->size(), 1);
  EXPECT_EQ((*data)->image, (ImageShape{.channels = 3, .side = 32}));
}

TEST(LoadTrainingDataTest, LoadsText) {
  const std::string path = testing::TempDir() + "/words.txt";
  std::ofstream(path) << std::string(20 * 4096, 'x');
  const auto data = LoadTrainingData({.path = path, .context = 128});
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train->size(), 19 * 32);
  EXPECT_EQ((*data)->test->size(), 32);
  EXPECT_EQ((*data)->train->predictions_per_sample(), 128);
  EXPECT_EQ((*data)->vocabulary, 256);
  EXPECT_FALSE((*data)->image.has_value());
  EXPECT_EQ(FirstToken(*(*data)->train), 'x');
  EXPECT_TRUE(absl::StartsWith(LoadTrainingData({.path = path, .context = 5000}).status().message(),
                               path + ": "));
}

TEST(LoadTrainingDataTest, ATextGetsATokenizerOfItsTrainingPart) {
  const std::string path = testing::TempDir() + "/two_parts.txt";
  std::string text;
  while (text.size() < 19 * 4096) text += "some words to learn ";
  text.resize(19 * 4096);
  while (text.size() < 20 * 4096) text += "ZZZZ";  // Held out.
  std::ofstream(path) << text;
  const auto data = LoadTrainingData({.path = path, .context = 32, .vocabulary = 264});
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->vocabulary, 264);
  EXPECT_EQ((*data)->tokenizer->size(), 264);
  EXPECT_EQ((*data)->tokenizer->Encode("ZZ").size(), 2u);
  EXPECT_GT((*data)->train->bytes_per_prediction(), 1.5);
  EXPECT_EQ((*data)->test->bytes_per_prediction(), 1);
  EXPECT_THAT(
      LoadTrainingData({.path = path, .context = 32, .vocabulary = 9000}).status().message(),
      testing::HasSubstr("the text yields at most "));
  EXPECT_THAT(LoadTrainingData({.path = path, .vocabulary = 264, .may_make_tokenizer = false})
                  .status()
                  .message(),
              testing::HasSubstr("the model has 264 tokens and no tokenizer in its folder"));
}

TEST(LoadTrainingDataTest, LoadsTokenShardsAndFindsThoseToTestWith) {
  const std::string folder = NewFolder("training_shards");
  WriteShard(folder + "/a_train_1.bin", 9, 1);
  WriteShard(folder + "/a_val_0.bin", 5, 2);
  WriteShard(folder + "/other.bin", 13, 3);
  const DataOptions options{.path = folder + "/a_train_*.bin", .context = 4, .vocabulary = 10};
  DataOptions whole_folder = options;
  whole_folder.path = folder;
  for (const DataOptions& each : {options, whole_folder}) {
    const auto data = LoadTrainingData(each);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ((*data)->train->size(), 2);
    EXPECT_EQ((*data)->test->size(), 1);
    EXPECT_EQ(FirstToken(*(*data)->train), 1);
    EXPECT_EQ(FirstToken(*(*data)->test), 2);
    EXPECT_EQ((*data)->vocabulary, 10);
  }
  DataOptions named = options;
  named.test_path = folder + "/other.bin";
  EXPECT_EQ(FirstToken(*(*LoadTrainingData(named))->test), 3);
  DataOptions small = options;
  small.vocabulary = 2;
  EXPECT_EQ(LoadTrainingData(small).status(),
            absl::InvalidArgumentError(
                folder + "/a_val_0.bin: token 0 is 2, not below the vocabulary of 2"));
}

TEST(LoadTrainingDataTest, AsksForTheShardsToTestWith) {
  const std::string path = testing::TempDir() + "/some.bin";
  WriteShard(path, 9, 1);
  const absl::Status status = LoadTrainingData({.path = path, .context = 4}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr(path + ": no token shards to test with"));
}

TEST(LoadTrainingDataTest, RefusesAnEmptySplitAndAMissingOne) {
  const std::string folder = NewFolder("empty");
  WriteSplit(folder, "train", 3);
  EXPECT_TRUE(absl::IsNotFound(LoadTrainingData({.path = folder}).status()));
  WriteSplit(folder, "t10k", 0);
  const absl::Status status = LoadTrainingData({.path = folder}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(folder));
}

TEST(LoadTrainingDataTest, AFileOfAFolderThatIsNoTextIsNamed) {
  const std::string folder = NewFolder("texts");
  std::ofstream(folder + "/a.txt") << std::string(200'000, 'a');
  std::ofstream(folder + "/b.png") << std::string("\x89PNG\0", 5);
  EXPECT_EQ(LoadTrainingData({.path = folder, .context = 4}).status(),
            absl::InvalidArgumentError(folder + "/b.png is not a text: byte 4 is zero; pass "
                                                "--data_kind=bytes to use it anyway"));
}

TEST(LoadTrainingDataTest, AKindThatIsGivenIsNotGuessed) {
  const std::string folder = NewFolder("named");
  WriteCifar(folder);
  EXPECT_TRUE(
      absl::IsNotFound(LoadTrainingData({.path = folder, .kind = DataKind::kIdx}).status()));
  // 33,803 bytes are not enough of a text.
  EXPECT_TRUE(absl::IsInvalidArgument(
      LoadTrainingData({.path = folder, .kind = DataKind::kText}).status()));
}

}  // namespace
}  // namespace evenkeel
