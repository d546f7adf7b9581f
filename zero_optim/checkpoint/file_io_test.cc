#include "evenkeel/zero_optim/checkpoint/file_io.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace evenkeel {
namespace {

class FileIoTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  void Put(const std::string& name, absl::string_view bytes) const {
    std::ofstream(Path(name), std::ios::binary).write(bytes.data(), bytes.size());
  }
  int FileCount() const {
    return std::distance(std::filesystem::directory_iterator(folder_),
                         std::filesystem::directory_iterator());
  }
  // `content` as gzip packs it.
  std::string Gzip(const std::string& content) const {
    gzFile file = gzopen(Path("packed.gz").c_str(), "wb");
    gzwrite(file, content.data(), content.size());
    gzclose(file);
    std::string packed = *ReadFile(Path("packed.gz"));
    std::filesystem::remove(Path("packed.gz"));
    return packed;
  }

  std::string folder_;
};

// Long enough for many chunks, and not the same everywhere.
std::string LongText() {
  std::string text;
  for (int i = 0; i < 200000; ++i) text += std::to_string(i * 7919 % 100003);
  return text;
}

TEST_F(FileIoTest, ReadsWhatWasWritten) {
  const absl::string_view pieces[] = {"one", "", absl::string_view("\0two", 4)};
  ASSERT_TRUE(WriteFileAtomically(Path("f"), pieces).ok());
  EXPECT_EQ(*ReadFile(Path("f")), std::string("one\0two", 7));
  EXPECT_EQ(FileCount(), 1);
}

TEST_F(FileIoTest, ReplacesAFileAndRespectsTheUmask) {
  Put("f", "old and longer");
  const mode_t before = umask(027);
  EXPECT_TRUE(WriteFileAtomically(Path("f"), "new").ok());
  umask(before);
  EXPECT_EQ(*ReadFile(Path("f")), "new");
  struct stat info;
  ASSERT_EQ(stat(Path("f").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST_F(FileIoTest, AFailedWriteLeavesEverythingAsItWas) {
  std::filesystem::create_directory(Path("folder"));
  EXPECT_EQ(WriteFileAtomically(Path("folder"), "new").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FileCount(), 1);
  const absl::Status missing = WriteFileAtomically(Path("no/such/folder"), "new");
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(missing.message(), "no/such/folder")) << missing;
  EXPECT_EQ(WriteFileAtomically("/dev/null", "new").code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(FileIoTest, SaysWhatIsWrongWithAPath) {
  EXPECT_EQ(ReadFile(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(ReadFile(Path("none")).status().message(), Path("none")));
  EXPECT_EQ(ReadFile(folder_).status().message(), folder_ + " is not a regular file");
  EXPECT_EQ(ReadFile("/dev/zero").status().message(), "/dev/zero is not a regular file");
  Put("big", "123456");
  EXPECT_EQ(ReadFile(Path("big"), {.max_bytes = 5}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*ReadFile(Path("big"), {.max_bytes = 6}), "123456");
}

TEST_F(FileIoTest, UnpacksWhateverTheNameIs) {
  const std::string text = LongText();
  Put("packed", Gzip(text));
  Put("plain.gz", text);
  EXPECT_EQ(*ReadFile(Path("packed"), {.gunzip = true}), text);
  EXPECT_EQ(*ReadFile(Path("plain.gz"), {.gunzip = true}), text);
  const std::string begin = *ReadFile(Path("packed"), {.gunzip = true, .only_begin = true});
  EXPECT_GE(begin.size(), std::min<size_t>(text.size(), 1024));
  EXPECT_EQ(begin, text.substr(0, begin.size()));
  EXPECT_EQ(*ReadFile(Path("packed")), Gzip(text));
  Put("members", Gzip("one,") + Gzip("") + Gzip("two"));
  EXPECT_EQ(*ReadFile(Path("members"), {.gunzip = true}), "one,two");
}

TEST_F(FileIoTest, RefusesDamagedGzip) {
  const std::string packed = Gzip(LongText());
  const struct {
    std::string bytes;
    std::string message;
  } cases[] = {
      {packed.substr(0, packed.size() - 1), "ends too early"},
      {packed.substr(0, packed.size() / 2), "ends too early"},
      {packed.substr(0, 5), "ends too early"},
      {packed + "x", "1 bytes follow"},
      {packed + std::string(1, '\x1f'), "1 bytes follow"},
      {packed.substr(0, packed.size() - 8) + std::string(8, '\0'), "damaged"},
      {"\x1f\x8b\x63 nothing that zlib knows", "damaged"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.message);
    Put("f", c.bytes);
    const absl::Status status = ReadFile(Path("f"), {.gunzip = true}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), c.message)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Path("f"))) << status;
  }
}

TEST_F(FileIoTest, StopsUnpackingAtTheLimit) {
  Put("bomb", Gzip(std::string(50'000'000, 'x')));
  const absl::Status status =
      ReadFile(Path("bomb"), {.gunzip = true, .max_bytes = 100'000}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

}  // namespace
}  // namespace evenkeel
