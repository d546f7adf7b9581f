#include "evenkeel/tools/installation/prefix.h"

#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

using testing::HasSubstr;

constexpr char kHeader[] = "include/evenkeel/comm/types.h";
constexpr char kOldHeader[] = "include/evenkeel/old/internal/old.h";
constexpr char kArchive[] = "lib/libevenkeel_comm.a";

class InstallFilesTest : public testing::Test {
 protected:
  InstallFilesTest() : prefix_(fs::path(testing::TempDir()) / "prefix with space") {
    fs::remove_all(prefix_);
  }
  ~InstallFilesTest() override { fs::remove_all(prefix_); }

  absl::StatusOr<InstallSummary> Install(const std::vector<FileToInstall>& files) {
    return InstallFiles(prefix_.string(), files);
  }

  std::string Read(const std::string& path) const {
    std::ifstream file(prefix_ / path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  void Write(const std::string& path, const std::string& content) const {
    fs::create_directories((prefix_ / path).parent_path());
    std::ofstream(prefix_ / path, std::ios::binary) << content;
  }

  int CountFiles() const {
    int files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(prefix_))
      files += !entry.is_directory();
    return files;
  }

  const fs::path prefix_;
};

TEST_F(InstallFilesTest, MakesTheFolderAndEveryFile) {
  const std::string bytes("\0\n\xff", 3);
  const absl::StatusOr<InstallSummary> done = Install({{kHeader, "int x;\n"}, {kArchive, bytes}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(done->written, 2);
  EXPECT_EQ(Read(kHeader), "int x;\n");
  EXPECT_EQ(Read(kArchive), bytes);
  EXPECT_EQ(Read(kInstalledFilesPath), absl::StrCat(kHeader, "\n", kArchive, "\n"));
  EXPECT_EQ(CountFiles(), 3);  // Nothing unfinished.
}

TEST_F(InstallFilesTest, AProgramIsExecutableForItsReaders) {
  const std::string program = absl::StrCat(kProgramPath, "top");
  const mode_t mask = umask(0027);
  ASSERT_TRUE(Install({{program, "1"}, {kHeader, "1"}}).ok());
  umask(mask);
  EXPECT_EQ(fs::status(prefix_ / program).permissions(), fs::perms(0750));
  EXPECT_EQ(fs::status(prefix_ / kHeader).permissions(), fs::perms(0640));
}

TEST_F(InstallFilesTest, ReplacesWhatHasChangedAndLeavesTheRestAsItIs) {
  ASSERT_TRUE(Install({{kHeader, "1"}, {kArchive, "1"}}).ok());
  const fs::file_time_type before = fs::last_write_time(prefix_ / kHeader) - std::chrono::hours(1);
  fs::last_write_time(prefix_ / kHeader, before);
  const absl::StatusOr<InstallSummary> done = Install({{kHeader, "1"}, {kArchive, "22"}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(done->written, 1);
  EXPECT_EQ(done->unchanged, 1);
  EXPECT_EQ(fs::last_write_time(prefix_ / kHeader), before);
  EXPECT_EQ(Read(kArchive), "22");
}

TEST_F(InstallFilesTest, RemovesWhatIsObsoleteWithItsEmptyFoldersAndNothingElse) {
  ASSERT_TRUE(Install({{kHeader, "1"}, {kOldHeader, "1"}}).ok());
  Write("include/evenkeel/mine.h", "a user's");
  Write("lib/libother.a", "a user's");
  const absl::StatusOr<InstallSummary> done = Install({{kHeader, "1"}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(done->removed, 1);
  EXPECT_FALSE(fs::exists(prefix_ / "include/evenkeel/old"));
  EXPECT_EQ(Read("include/evenkeel/mine.h"), "a user's");
  EXPECT_EQ(Read("lib/libother.a"), "a user's");
  EXPECT_EQ(Read(kInstalledFilesPath), absl::StrCat(kHeader, "\n"));
}

TEST_F(InstallFilesTest, AnObsoleteFileThatIsGoneAlreadyIsFine) {
  ASSERT_TRUE(Install({{kHeader, "1"}, {kOldHeader, "1"}}).ok());
  fs::remove_all(prefix_ / "include/evenkeel/old");
  EXPECT_TRUE(Install({{kHeader, "1"}}).ok());
}

TEST_F(InstallFilesTest, SomebodyElsesFileIsNotTouched) {
  Write(kArchive, "another package's");
  const absl::Status status = Install({{kHeader, "1"}, {kArchive, "1"}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr(kArchive));
  EXPECT_EQ(Read(kArchive), "another package's");
  EXPECT_EQ(CountFiles(), 1);
}

TEST_F(InstallFilesTest, ASymbolicLinkIsReplacedNotFollowed) {
  ASSERT_TRUE(Install({{kHeader, "1"}}).ok());
  Write("precious", "a user's");
  fs::remove(prefix_ / kHeader);
  fs::create_symlink(prefix_ / "precious", prefix_ / kHeader);
  ASSERT_TRUE(Install({{kHeader, "2"}}).ok());
  EXPECT_EQ(Read("precious"), "a user's");
  EXPECT_EQ(Read(kHeader), "2");
}

TEST_F(InstallFilesTest, AListThatNamesOtherFilesIsRefusedAndNothingIsRemoved) {
  for (const char* line : {"/etc/passwd", "precious", "include/evenkeel/../../precious",
                           "lib/libevenkeel_/../../precious", "include/evenkeel//x",
                           "include/evenkeel/", "share/evenkeel/installed_files.txt"}) {
    Write("precious", "a user's");
    Write(kInstalledFilesPath, absl::StrCat(kOldHeader, "\n", line, "\n"));
    Write(kOldHeader, "1");
    const absl::Status status = Install({{kHeader, "1"}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << line;
    EXPECT_THAT(status.message(), HasSubstr(line));
    EXPECT_EQ(Read("precious"), "a user's") << line;
    EXPECT_EQ(Read(kOldHeader), "1") << line;
  }
}

TEST_F(InstallFilesTest, EveryBeginningOfAListIsRefusedOrHarmless) {
  ASSERT_TRUE(Install({{kHeader, "1"}, {kArchive, "1"}}).ok());
  const std::string list = Read(kInstalledFilesPath);
  for (size_t size = 0; size < list.size(); ++size) {
    Write(kInstalledFilesPath, list.substr(0, size));
    Write("include/evenkeel/comm/mine.h", "a user's");
    Install({{kHeader, "1"}, {kArchive, "1"}}).status().IgnoreError();
    EXPECT_EQ(Read(kHeader), "1") << size;
    EXPECT_EQ(Read(kArchive), "1") << size;
    EXPECT_EQ(Read("include/evenkeel/comm/mine.h"), "a user's") << size;
  }
}

TEST_F(InstallFilesTest, AnInstallationThatWasCutShortIsFinishedByTheNext) {
  // Its list names everything, and one file isn't there yet.
  ASSERT_TRUE(Install({{kHeader, "1"}, {kArchive, "1"}}).ok());
  fs::remove(prefix_ / kArchive);
  const absl::StatusOr<InstallSummary> done = Install({{kHeader, "1"}, {kArchive, "1"}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(Read(kArchive), "1");
}

TEST_F(InstallFilesTest, PathsThatAreNotOursAreRefused) {
  for (const char* path :
       {"", "/include/evenkeel/a.h", "bin/evenkeel", "include/evenkeel/../a.h"}) {
    EXPECT_EQ(Install({{path, "1"}}).status().code(), absl::StatusCode::kInvalidArgument) << path;
  }
  EXPECT_EQ(Install({{kHeader, "1"}, {kHeader, "2"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(fs::exists(prefix_));
}

TEST_F(InstallFilesTest, APrefixThatIsAFileIsNamedInTheError) {
  fs::create_directories(prefix_.parent_path());
  std::ofstream(prefix_) << "x";
  const absl::Status status = Install({{kHeader, "1"}}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.message(), HasSubstr(prefix_.string()));
}

}  // namespace
}  // namespace evenkeel
