#include "evenkeel/files/file_sums.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/files/file_io.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

std::string Bytes(int64_t count) {
  std::string bytes(count, '\0');
  uint32_t random = 1;
  for (char& byte : bytes) byte = static_cast<char>((random = random * 1664525 + 1013904223) >> 24);
  return bytes;
}

std::string Write(const std::string& contents) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/sums");
  const absl::string_view pieces[] = {contents};
  EXPECT_TRUE(WriteFileAtomically(path, pieces).ok());
  return path;
}

TEST(FileSumsTest, AreReadAsTheyWereWritten) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, kSumBlock - 1, kSumBlock, kSumBlock + 1, 3 * kSumBlock + 7}) {
    const auto sums = SumsOf(Write(Bytes(bytes)));
    ASSERT_TRUE(sums.ok()) << sums.status();
    EXPECT_EQ(static_cast<int64_t>(sums->blocks.size()), (bytes + kSumBlock - 1) / kSumBlock);
    const auto read = FileSums::FromHex(bytes, sums->Hex());
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, *sums);
    EXPECT_FALSE(FileSums::FromHex(bytes + kSumBlock, sums->Hex()).ok());
    EXPECT_FALSE(FileSums::FromHex(-1, sums->Hex()).ok());
  }
  for (const char* hex : {"0000000", "0000000g", "+0000000", "0x000000", "000000000"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(FileSums::FromHex(1, hex).status())) << hex;
  }
}

TEST(CheckedFileTest, ReadsAnyPart) {
  const std::string contents = Bytes(2 * kSumBlock + 100);
  const std::string path = Write(contents);
  auto file = CheckedFile::Open(path, *SumsOf(path));
  ASSERT_TRUE(file.ok()) << file.status();
  const int64_t size = static_cast<int64_t>(contents.size());
  for (const int64_t begin :
       {int64_t{0}, int64_t{5}, kSumBlock - 1, kSumBlock, 2 * kSumBlock + 99, size}) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{300}, kSumBlock + 3}) {
      if (begin + count > size) continue;
      std::vector<std::byte> into(count);
      ASSERT_TRUE(file->Read(begin, absl::MakeSpan(into)).ok());
      EXPECT_EQ(absl::string_view(reinterpret_cast<const char*>(into.data()), count),
                absl::string_view(contents).substr(begin, count));
    }
  }
  std::vector<std::byte> into(2);
  EXPECT_TRUE(absl::IsInvalidArgument(file->Read(size - 1, absl::MakeSpan(into))));
  EXPECT_TRUE(absl::IsInvalidArgument(file->Read(-1, absl::MakeSpan(into))));
}

TEST(CheckedFileTest, FindsEveryFlippedBitWhereItReadsAndOtherSizes) {
  const std::string contents = Bytes(kSumBlock + 50);
  const FileSums sums = *SumsOf(Write(contents));
  for (const int64_t at : {int64_t{0}, kSumBlock / 2, kSumBlock - 1, kSumBlock, kSumBlock + 49}) {
    std::string damaged = contents;
    damaged[at] ^= 1 << (at % 8);
    auto file = CheckedFile::Open(Write(damaged), sums);
    ASSERT_TRUE(file.ok());
    std::vector<std::byte> into(1);
    const absl::Status status = file->Read(at, absl::MakeSpan(into));
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is damaged"));
    const int64_t elsewhere = at < kSumBlock ? kSumBlock + 1 : 1;  // In the other block.
    EXPECT_TRUE(file->Read(elsewhere, absl::MakeSpan(into)).ok());
  }
  EXPECT_TRUE(absl::IsDataLoss(CheckedFile::Open(Write(contents.substr(1)), sums).status()));
  EXPECT_TRUE(absl::IsDataLoss(CheckedFile::Open(Write(contents + "x"), sums).status()));
  EXPECT_TRUE(absl::IsNotFound(CheckedFile::Open("/nowhere/at/all", sums).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckedFile::Open("/tmp", sums).status()));
}

}  // namespace
}  // namespace evenkeel
