#include "evenkeel/files/file_io.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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

  std::string folder_;
};

TEST_F(FileIoTest, ReadsWhatWasWritten) {
  const absl::string_view pieces[] = {"one", "", absl::string_view("\0two", 4)};
  ASSERT_TRUE(WriteFileAtomically(Path("f"), pieces).ok());
  EXPECT_EQ(*ReadFile(Path("f")), std::string("one\0two", 7));
  EXPECT_EQ(FileCount(), 1);
}

TEST_F(FileIoTest, NamesEverythingInAFolder) {
  EXPECT_EQ(NamesIn(folder_)->size(), 0);
  Put(".hidden", "");
  std::filesystem::create_directory(Path("folder"));
  auto names = NamesIn(folder_ + "/");
  ASSERT_TRUE(names.ok()) << names.status();
  std::ranges::sort(*names);
  EXPECT_EQ(*names, (std::vector<std::string>{".hidden", "folder"}));
  const absl::Status missing = NamesIn(Path("none")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(missing.message(), "cannot read the folder " + Path("none")));
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

// Another user who may write to the folder guesses the next names.
TEST_F(FileIoTest, ALinkInTheWayIsNotFollowed) {
  Put("victim", "mine");
  for (int i = 0; i < 50; ++i) {
    std::filesystem::create_symlink(Path("victim"),
                                    Path(absl::StrCat("f.", getpid(), "-", i, ".tmp")));
  }
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "new").ok());
  EXPECT_EQ(*ReadFile(Path("f")), "new");
  EXPECT_EQ(*ReadFile(Path("victim")), "mine");
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

}  // namespace
}  // namespace evenkeel
