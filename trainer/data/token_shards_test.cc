#include "evenkeel/trainer/data/token_shards.h"

#include <gtest/gtest.h>

#include <algorithm>
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
#include "evenkeel/trainer/data/sampler.h"

namespace evenkeel {
namespace {

std::string LittleEndian(uint32_t value) {
  return {static_cast<char>(value), static_cast<char>(value >> 8), static_cast<char>(value >> 16),
          static_cast<char>(value >> 24)};
}

std::string Header(uint32_t magic, uint32_t version, uint32_t count) {
  return absl::StrCat(LittleEndian(magic), LittleEndian(version), LittleEndian(count),
                      std::string(253 * 4, '\0'));
}

// Tokens first, first + 1, ...
std::string Shard(int first, int count) {
  std::string file = Header(20240520, 1, count);
  for (int token = first; token < first + count; ++token) file += LittleEndian(token).substr(0, 2);
  return file;
}

class TokenShardsTest : public testing::Test {
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

TEST_F(TokenShardsTest, SequencesComeFromAllShardsThatMatchAndStayInOne) {
  Put("part_val_000000.bin", Shard(50000, 9));
  Put("part_train_000002.bin", Shard(40000, 6));
  Put("part_train_000001.bin", Shard(100, 11));
  const auto train = TokenShards::Open(folder_ + "/part_train_*.bin", {.context = 4});
  ASSERT_TRUE(train.ok()) << train.status();
  EXPECT_EQ(train->predictions_per_sample(), 4);
  ASSERT_EQ(train->size(), 5);
  BatchMemory memory;
  const auto batch = std::get<TokenBatch>(train->Gather(InOrder(5), memory));
  EXPECT_EQ(batch.context, 4);
  const std::vector<int32_t> begins = {100, 104, 106, 40000, 40001};
  for (size_t i = 0; i < begins.size(); ++i) {
    for (int j = 0; j < 4; ++j) {
      EXPECT_EQ(batch.inputs[4 * i + j], begins[i] + j);
      EXPECT_EQ(batch.targets[4 * i + j], begins[i] + j + 1);
    }
  }
  EXPECT_EQ(TokenShards::Open(folder_ + "/*_val_*", {.context = 4})->size(), 2);
  EXPECT_EQ(TokenShards::Open(folder_, {.context = 4})->size(), 7);
}

TEST_F(TokenShardsTest, TokensHaveSixteenBitsWithoutASign) {
  const std::string path = Put("a.bin", Shard(65533, 3));
  const auto data = TokenShards::Open(path, {.context = 2, .vocabulary = 65536});
  ASSERT_TRUE(data.ok()) << data.status();
  BatchMemory memory;
  const auto batch = std::get<TokenBatch>(data->Gather(InOrder(1), memory));
  EXPECT_EQ(batch.targets[1], 65535);
}

TEST_F(TokenShardsTest, SaysWhatIsWrongWithAShard) {
  const std::string good = Shard(7, 50);
  const struct {
    std::string contents, message;
  } cases[] = {
      {"", "a token shard's header has 1024 bytes, this file has 0"},
      {good.substr(0, 3), "a token shard's header has 1024 bytes, this file has 3"},
      {good.substr(0, 1023), "a token shard's header has 1024 bytes, this file has 1023"},
      {Header(20240521, 1, 0), "is not a token shard: it begins with 20240521, not 20240520"},
      {"some text", "is not a token shard: it begins with 1701670771, not 20240520"},
      {Header(20240520, 2, 0), "is a token shard of version 2, not 1"},
      {good.substr(0, 1024),
       "is too short: 50 tokens of 2 bytes should follow the header, 0 bytes do"},
      {good.substr(0, good.size() - 1),
       "is too short: 50 tokens of 2 bytes should follow the header, 99 bytes do"},
      {good + "x", "is too long: 50 tokens of 2 bytes should follow the header, 101 bytes do"},
      {Header(20240520, 1, 0xFFFFFFFF),
       "is too long: -1 tokens of 2 bytes should follow the header, 0 bytes do"},
      {Header(20240520, 1, 0x7FFFFFFF),
       "is too short: 2147483647 tokens of 2 bytes should follow the header, 0 bytes do"},
      {Shard(7, 4),
       "has 4 tokens, too few for a context of 4 with its targets; use a shorter context or leave "
       "the shard out"},
      {Shard(0, 0),
       "has 0 tokens, too few for a context of 4 with its targets; use a shorter context or leave "
       "the shard out"},
      {Shard(50250, 20), "token 7 is 50257, not below the vocabulary of 50257"},
  };
  Put("part_1.bin", good);
  for (const auto& c : cases) {
    const std::string path = Put("part_2.bin", c.contents);
    EXPECT_EQ(TokenShards::Open(folder_ + "/part_*.bin", {.context = 4}).status(),
              absl::InvalidArgumentError(absl::StrCat(path, ": ", c.message)));
  }
}

// Open() does not look at all tokens.
TEST_F(TokenShardsTest, AModelsErrorIsExplainedWithTheFiles) {
  Put("part_1.bin", Shard(0, 20));
  const std::string second = Put("part_2.bin", Shard(0, 20));
  const auto shards = TokenShards::Open(folder_ + "/part_*.bin", {.context = 4});
  ASSERT_TRUE(shards.ok()) << shards.status();
  const int32_t last[] = {static_cast<int32_t>(shards->size() - 1)};
  EXPECT_EQ(shards->Explain(absl::InvalidArgumentError("token 7 is not within 0 to 6"), last),
            absl::InvalidArgumentError(second + ": token 7 is not within 0 to 6"));
}

TEST_F(TokenShardsTest, SaysWhatIsMissingOrImpossible) {
  EXPECT_EQ(TokenShards::Open(folder_ + "/part_*.bin", {.context = 4}).status(),
            absl::NotFoundError("no file matches " + folder_ + "/part_*.bin"));
  for (int64_t context : {int64_t{0}, int64_t{-5}}) {
    EXPECT_EQ(TokenShards::Open(folder_, {.context = context}).status(),
              absl::InvalidArgumentError(
                  absl::StrCat("a context must have at least 1 token, got ", context)));
  }
  const std::string path = Put("a.bin", Shard(0, 50));
  EXPECT_TRUE(absl::IsInvalidArgument(TokenShards::Open(path, {.context = INT64_MAX}).status()));
}

TEST_F(TokenShardsTest, ALateTokenBeyondTheVocabularyIsTheModelsToRefuse) {
  std::string contents = Shard(0, 65536 + 10);  // The last ten are 0 to 9 again.
  contents.replace(contents.size() - 2, 2, LittleEndian(65535).substr(0, 2));
  for (size_t i = 1024; i < 1024 + 2 * 65536; i += 2) contents[i + 1] &= '\x7f';
  const auto data = TokenShards::Open(Put("a.bin", contents), {.context = 9, .vocabulary = 32768});
  ASSERT_TRUE(data.ok()) << data.status();
  BatchMemory memory;
  const int32_t last = static_cast<int32_t>(data->size()) - 1;
  EXPECT_EQ(CheckTokens(data->Gather({&last, 1}, memory), 9, 32768).status(),
            absl::InvalidArgumentError("forward: token 65535 is not within 0 to 32767"));
}

// Whatever becomes of a file, it is refused, or all of its sequences can be read.
TEST_F(TokenShardsTest, ADamagedFileIsReadOrRefused) {
  const std::string good = Shard(7, 40);
  BatchMemory memory;
  int accepted = 0;
  for (size_t bit = 0; bit < good.size() * 8; bit += bit < 16 * 8 ? 1 : 61) {
    std::string bad = good;
    bad[bit / 8] ^= static_cast<char>(1 << bit % 8);
    const std::string path = Put("flipped.bin", bad);
    const auto data = TokenShards::Open(path, {.context = 4});
    if (!data.ok()) {
      EXPECT_TRUE(absl::IsInvalidArgument(data.status())) << data.status();
      continue;
    }
    ++accepted;
    EXPECT_EQ(data->size(), 10);
    EXPECT_EQ(SamplesOf(data->Gather(InOrder(data->size()), memory)), data->size());
    EXPECT_GE(bit, 12u * 8) << "the magic, the version and the count are checked";
  }
  EXPECT_GT(accepted, 50);  // The rest of the header says nothing.
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(TokensOfShard(absl::string_view(good).substr(0, bytes)).status()))
        << bytes;
  }
}

TEST(TokenShardsFuzzTest, NoBytesDoHarm) {
  const auto parse = [](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::StatusOr<absl::string_view> tokens = TokensOfShard(bytes);
    if (!tokens.ok()) return tokens.status();
    EXPECT_EQ(tokens->size() + 1024, bytes.size());
    return absl::StrCat(bytes.substr(0, 1024), *tokens);
  };
  Fuzz({Shard(7, 40), Shard(0, 0)}, parse, {.rounds = 5000});
}

}  // namespace
}  // namespace evenkeel
