#include "evenkeel/comm/rendezvous/file_store.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

std::string NewFolder() {
  std::string pattern = testing::TempDir() + "/folderXXXXXX";
  return mkdtemp(pattern.data());
}

std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const dir = opendir(folder.c_str());
  while (const dirent* entry = readdir(dir)) {
    if (entry->d_name[0] != '.') names.push_back(entry->d_name);
  }
  closedir(dir);
  return names;
}

TEST(FileStoreTest, FolderAndFilesAreTheOwnersAlone) {
  const std::string folder = NewFolder() + "/new";
  const mode_t before = umask(0);
  const absl::StatusOr<std::unique_ptr<FileStore>> store = FileStore::Open(folder + "/");
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->Set("secret", "s").ok());
  ASSERT_TRUE((*store)->Add("number", 1).ok());
  umask(before);
  struct stat info = {};
  ASSERT_EQ(stat(folder.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  for (const std::string& name : FilesIn(folder)) {
    ASSERT_EQ(stat((folder + "/" + name).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u) << name;
  }
}

TEST(FileStoreTest, LeavesNoDraftsBehind) {
  const std::string folder = NewFolder();
  const std::unique_ptr<FileStore> store = FileStore::Open(folder).value();
  ASSERT_TRUE(store->Set("a", "1").ok());
  ASSERT_TRUE(store->Set("a", "2").ok());
  ASSERT_TRUE(store->GetOrSet("a", "3").ok());
  ASSERT_TRUE(store->GetOrSet("b", "4").ok());
  EXPECT_THAT(FilesIn(folder), testing::UnorderedElementsAre("v.a", "v.b"));
}

// Rank 0 of a job that fails does that, while others still come.
TEST(FileStoreTest, AFolderThatWasClearedAwayIsMadeAgain) {
  const std::string folder = NewFolder();
  const absl::StatusOr<std::unique_ptr<FileStore>> store = FileStore::Open(folder);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ(rmdir(folder.c_str()), 0);
  EXPECT_EQ((*store)->GetOrSet("secret", "s").value_or(""), "s");
  struct stat info = {};
  ASSERT_EQ(stat(folder.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 077, 0u);
}

TEST(FileStoreTest, RefusesAFolderThatIsOpenToOthers) {
  const std::string folder = NewFolder();
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  const absl::Status status = FileStore::Open(folder).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("chmod 700"));
}

TEST(FileStoreTest, RefusesALinkInPlaceOfTheFolder) {
  const std::string folder = NewFolder(), link = NewFolder() + "/link";
  ASSERT_EQ(symlink(folder.c_str(), link.c_str()), 0);
  EXPECT_FALSE(FileStore::Open(link).ok());
}

TEST(FileStoreTest, RefusesAFileInPlaceOfTheFolder) {
  const std::string folder = NewFolder();
  ASSERT_TRUE(FileStore::Open(folder).value()->Set("x", "y").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(FileStore::Open(folder + "/v.x").status()));
}

TEST(FileStoreTest, SaysWhichFolderItCannotMake) {
  const absl::Status status = FileStore::Open("/nowhere/at/all").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/at/all"));
}

}  // namespace
}  // namespace evenkeel
