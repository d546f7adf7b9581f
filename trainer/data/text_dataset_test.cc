#include "evenkeel/trainer/data/text_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/sampler.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/tokenizer/learn_tokenizer.h"

namespace evenkeel {
namespace {

constexpr int64_t kBlock = TextDataset::kBlock;

// Bytes whose neighbourhood of 8 names their place: no two windows are the same.
std::shared_ptr<const std::string> SomeText(int64_t bytes, uint64_t seed = 1) {
  StableRandom random(seed);
  auto text = std::make_shared<std::string>(bytes, '\0');
  std::ranges::generate(*text, [&] { return static_cast<char>(random.Next()); });
  return text;
}

TextDataset MakeSplit(std::shared_ptr<const std::string> text, int64_t context, Split split) {
  absl::StatusOr<TextDataset> data =
      TextDataset::Make(std::move(text), {.context = context, .split = split});
  EXPECT_TRUE(data.ok()) << data.status();
  return *std::move(data);
}

// Where each sample of the data set begins in the text.
std::vector<int64_t> Begins(const TextDataset& data, const std::string& text) {
  std::vector<int64_t> begins;
  BatchMemory memory;
  const int64_t context = data.predictions_per_sample();
  for (int32_t sample : InOrder(data.size())) {
    const auto batch = std::get<TokenBatch>(data.Gather({&sample, 1}, memory));
    std::string window;
    for (int32_t token : batch.inputs) window += static_cast<char>(token);
    window += static_cast<char>(batch.targets.back());
    for (int64_t i = 0; i < context; ++i)
      EXPECT_EQ(batch.targets[i], static_cast<uint8_t>(window[i + 1]));
    const size_t begin =
        text.find(window, begins.empty() ? 0 : begins.back());  // They come in order.
    EXPECT_NE(begin, std::string::npos);
    begins.push_back(static_cast<int64_t>(begin));
  }
  return begins;
}

TEST(TextDatasetTest, TokensAreBytesAndTargetsFollowThem) {
  auto text = std::make_shared<std::string>(20 * kBlock, '\0');
  std::iota(text->begin(), text->end(), '\0');
  const TextDataset data = MakeSplit(text, 256, Split::kTrain);
  EXPECT_EQ(data.bytes_per_prediction(), 1);
  EXPECT_EQ(data.predictions_per_sample(), 256);
  EXPECT_EQ(data.size(), 19 * kBlock / 256);
  BatchMemory memory;
  const std::vector<int32_t> samples = {1};
  const auto batch = std::get<TokenBatch>(data.Gather(samples, memory));
  ASSERT_EQ(batch.inputs.size(), 256u);
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(batch.inputs[i], i);  // 0 to 255: no byte is negative.
    EXPECT_EQ(batch.targets[i], (i + 1) % 256);
  }
  EXPECT_TRUE(CheckTokens(batch, 256, 256).ok());
}

// Returns whether a byte belongs to the test split: the rule in the header, written in another way.
bool IsHeldOut(int64_t position, int64_t bytes) {
  const int64_t block = std::min(position / kBlock, bytes / kBlock - 1);
  return block % 20 == 19;
}

TEST(TextDatasetTest, NoSequenceCrossesABorderAndNoByteIsDropped) {
  for (int64_t bytes : {20 * kBlock, 21 * kBlock - 1, 21 * kBlock, 22 * kBlock + 77, 39 * kBlock,
                        40 * kBlock + 4095}) {
    const auto text = SomeText(bytes);
    for (int64_t context : {8, 100, 1024, 4095}) {
      SCOPED_TRACE(testing::Message() << bytes << " bytes, context " << context);
      std::vector<int> predicted(bytes);
      int64_t samples = 0;
      for (Split split : {Split::kTrain, Split::kTest}) {
        const TextDataset data = MakeSplit(text, context, split);
        samples += data.size();
        for (int64_t begin : Begins(data, *text)) {
          for (int64_t i = begin; i <= begin + context; ++i) {
            ASSERT_EQ(IsHeldOut(i, bytes), split == Split::kTest) << "byte " << i;
          }
          for (int64_t i = begin + 1; i <= begin + context; ++i) ++predicted[i];
        }
      }
      int64_t runs = 0, twice = 0;
      for (int64_t i = 0; i < bytes; ++i) {
        const bool is_first = i == 0 || IsHeldOut(i, bytes) != IsHeldOut(i - 1, bytes);
        runs += is_first ? 1 : 0;
        ASSERT_EQ(predicted[i] == 0, is_first) << "byte " << i;
        twice += std::max(0, predicted[i] - 1);
      }
      EXPECT_EQ(bytes - runs + twice, samples * context);
      // A power of two costs one prediction per run, if the text is whole blocks.
      if (context == 1024 && bytes % kBlock == 0) {
        EXPECT_EQ(twice, runs);
      }
    }
  }
}

// All tokens but the first of each run are predicted, some of them twice.
TEST(TextDatasetTest, TokensOfATokenizer) {
  std::string line = "one two three four five six seven eight nine ten\n", whole;
  while (static_cast<int64_t>(whole.size()) < 41 * kBlock) whole += line;
  const auto text = std::make_shared<const std::string>(whole);
  const absl::StatusOr<Tokenizer> tokenizer = LearnTokenizer({{*text}}, 280);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const int64_t context : {16, 64, 1024}) {
    SCOPED_TRACE(context);
    const int64_t block = std::max<int64_t>(kBlock, 16 * context);
    if (20 * block > static_cast<int64_t>(text->size())) {
      EXPECT_THAT(TextDataset::Make(text, {.context = context, .tokenizer = &*tokenizer})
                      .status()
                      .message(),
                  testing::HasSubstr(absl::StrCat("at least ", 20 * block, " bytes")));
      continue;
    }
    for (const Split split : {Split::kTrain, Split::kTest}) {
      const absl::StatusOr<TextDataset> data =
          TextDataset::Make(text, {.context = context, .split = split, .tokenizer = &*tokenizer});
      ASSERT_TRUE(data.ok()) << data.status();
      BatchMemory memory;
      double bytes = 0;
      for (const int32_t sample : InOrder(data->size())) {
        const auto batch = std::get<TokenBatch>(data->Gather({&sample, 1}, memory));
        std::string sequence(tokenizer->piece(batch.inputs[0]));
        for (int64_t i = 0; i < context; ++i) {
          const absl::string_view piece = tokenizer->piece(batch.targets[i]);
          absl::StrAppend(&sequence, piece);
          bytes += static_cast<double>(piece.size());
          ASSERT_TRUE(i == 0 || batch.inputs[i] == batch.targets[i - 1]);
        }
        const size_t at = text->find(sequence.substr(0, 200));
        ASSERT_NE(at, std::string::npos) << sequence;
      }
      const double predictions = static_cast<double>(data->size() * context);
      EXPECT_DOUBLE_EQ(data->bytes_per_prediction(), bytes / predictions);
      // All of the split, and not much twice.
      const double share = split == Split::kTrain ? 0.95 : 0.05;
      EXPECT_NEAR(bytes / static_cast<double>(text->size()), share, 0.02);
    }
  }
}

TEST(TextDatasetTest, SplitsShareOneCopyOfTheText) {
  const auto text = SomeText(20 * kBlock);
  const TextDataset train = MakeSplit(text, 64, Split::kTrain);
  const TextDataset test = MakeSplit(text, 64, Split::kTest);
  EXPECT_EQ(text.use_count(), 3);
  EXPECT_EQ(test.size(), kBlock / 64);
}

TEST(TextDatasetTest, RefusesAShortTextAndAContextWithoutRoom) {
  EXPECT_EQ(TextDataset::Make(SomeText(20 * kBlock - 1), {.context = 8}).status(),
            absl::InvalidArgumentError(
                "a text of 81919 bytes is too short: every 20th block of 4096 bytes is held out "
                "for testing, so that at least 81920 bytes are needed; pass a folder or a pattern "
                "to join several files"));
  EXPECT_TRUE(absl::IsInvalidArgument(TextDataset::Make(SomeText(0), {.context = 8}).status()));
  for (int64_t context : {int64_t{-1}, int64_t{0}, kBlock, INT64_MAX}) {
    EXPECT_EQ(TextDataset::Make(SomeText(20 * kBlock), {.context = context}).status(),
              absl::InvalidArgumentError(absl::StrCat(
                  "a text is held out in blocks of 4096 bytes, which cannot hold a context of ",
                  context, "; use 1 to 4095")));
  }
}

class LoadTextTest : public testing::Test {
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

TEST_F(LoadTextTest, JoinsFilesPlainAndPackedByName) {
  Put("b.txt", "second ");
  PutGzip("c.txt.gz", "third");
  Put("a.txt", "first ");
  Put("empty.txt", "");
  Put("zz.md", " last");
  EXPECT_EQ(**LoadText(folder_), "first second third last");
  EXPECT_EQ(**LoadText(folder_ + "/*.txt*"), "first second third");
  EXPECT_EQ(**LoadText(folder_ + "/a.txt"), "first ");
  EXPECT_EQ(**LoadText(folder_ + "/c.txt.gz"), "third");
  EXPECT_EQ(**LoadText(folder_ + "/c.txt"), "third");
}

TEST_F(LoadTextTest, SaysWhatIsWrongWithAFile) {
  EXPECT_EQ(LoadText(folder_ + "/a.txt").status(),
            absl::NotFoundError("no such file or folder: " + folder_ + "/a.txt"));
  PutGzip("a.txt.gz", *SomeText(1000));
  std::filesystem::resize_file(folder_ + "/a.txt.gz", 300);
  EXPECT_TRUE(absl::StartsWith(LoadText(folder_).status().message(),
                               folder_ + "/a.txt.gz: the gzip data ends too early"));
}

TEST_F(LoadTextTest, ADamagedPackedFileIsReadOrRefused) {
  const std::string good = *SomeText(1000);
  PutGzip("good.gz", good);
  std::ifstream stream(folder_ + "/good.gz", std::ios::binary);
  const std::string packed{std::istreambuf_iterator<char>(stream), {}};
  ASSERT_GT(packed.size(), 18u);
  for (size_t bytes = 2; bytes < packed.size(); ++bytes) {
    Put("bad.gz", absl::string_view(packed).substr(0, bytes));
    EXPECT_FALSE(LoadText(folder_ + "/bad.gz").ok()) << bytes;
  }
  StableRandom random(3);
  for (int round = 0; round < 500; ++round) {
    std::string bad = packed;
    bad[2 + random.Below(bad.size() - 2)] ^=
        static_cast<char>(1 << random.Below(8));  // It stays a gzip file.
    Put("bad.gz", bad);
    const auto text = LoadText(folder_ + "/bad.gz");
    if (text.ok()) {
      EXPECT_EQ(**text, good);  // The checksum lets nothing else pass.
    } else {
      EXPECT_TRUE(absl::StrContains(text.status().message(), "bad.gz")) << text.status();
    }
  }
}

TEST(JargonFileTest, IsThereOrTheErrorSaysWhoInstallsIt) {
  const auto text = LoadText(kJargonFile);
  if (absl::IsNotFound(text.status())) {
    EXPECT_TRUE(
        absl::StrContains(text.status().message(), "Debian's package jargon-text installs it"));
    return;
  }
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_GT((*text)->size(), 1'500'000u);
  const TextDataset train = MakeSplit(*text, 256, Split::kTrain);
  const TextDataset test = MakeSplit(*text, 256, Split::kTest);
  const double held_out =
      static_cast<double>(test.size()) / static_cast<double>(test.size() + train.size());
  EXPECT_NEAR(held_out, 0.05, 0.005);
}

}  // namespace
}  // namespace evenkeel
