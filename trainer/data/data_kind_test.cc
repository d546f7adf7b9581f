#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/data/training_data.h"

namespace evenkeel {
namespace {

constexpr absl::string_view kShardMagic = "\x88\xd8\x34\x01";  // 20240520, little-endian.

class GuessDataKindTest : public testing::Test {
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

  std::string folder_;
};

TEST_F(GuessDataKindTest, KnowsMnistByAnyOfItsNames) {
  for (const char* name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz",
                           "t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte.gz"}) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    Put(name, "");
    EXPECT_EQ(*GuessDataKind(folder_), DataKind::kIdx) << name;
    EXPECT_EQ(*GuessDataKind(folder_ + "/"), DataKind::kIdx) << name;
  }
}

TEST_F(GuessDataKindTest, KnowsCifarByItsFirstFile) {
  Put("readme.html", "words");
  Put("data_batch_1.bin", "");
  EXPECT_EQ(*GuessDataKind(folder_), DataKind::kCifar);
}

TEST_F(GuessDataKindTest, KnowsTokenShardsByTheirFirstBytes) {
  Put("README.md", "words");
  const std::string shard = Put("some_train_000001.bin", kShardMagic);
  EXPECT_EQ(*GuessDataKind(shard), DataKind::kTokens);
  EXPECT_EQ(*GuessDataKind(folder_ + "/*_train_*.bin"), DataKind::kTokens);
  EXPECT_EQ(*GuessDataKind(folder_), DataKind::kTokens);
  EXPECT_EQ(*GuessDataKind(folder_ + "/*.md"), DataKind::kText);
}

TEST_F(GuessDataKindTest, TakesEverythingElseForText) {
  EXPECT_EQ(*GuessDataKind(Put("a.txt", "words")), DataKind::kText);
  EXPECT_EQ(*GuessDataKind(Put("empty", "")), DataKind::kText);
  EXPECT_EQ(*GuessDataKind(folder_), DataKind::kText);
  EXPECT_EQ(*GuessDataKind(folder_ + "/a*"), DataKind::kText);
  Put("b.txt.gz", "packed");
  EXPECT_EQ(*GuessDataKind(folder_ + "/b.txt"), DataKind::kText);
}

TEST_F(GuessDataKindTest, SaysWhatThereCouldBe) {
  for (const std::string& path : {folder_, folder_ + "/nothing", folder_ + "/*.bin"}) {
    const absl::Status status = GuessDataKind(path).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    for (absl::string_view words :
         {absl::string_view(path), absl::string_view("train-images-idx3-ubyte"),
          absl::string_view("data_batch_1.bin"), absl::string_view("any text")}) {
      EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
    }
  }
}

TEST(GuessDefaultsTest, TheDefaultsAreKnownEvenWhereTheyAreMissing) {
  EXPECT_EQ(*GuessDataKind(kFashionMnistFolder), DataKind::kIdx);
  EXPECT_EQ(*GuessDataKind(kJargonFile), DataKind::kText);
}

}  // namespace
}  // namespace evenkeel
