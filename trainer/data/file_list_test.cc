#include "evenkeel/trainer/data/file_list.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace evenkeel {
namespace {

class FilesAtTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ + "/below");
    for (const char* name : {"b.txt", "a.txt", "B.txt", ".hidden", "c.bin", "below/d.txt"}) {
      std::ofstream(folder_ + "/" + name) << name;
    }
  }
  std::vector<std::string> Paths(std::vector<std::string> names) const {
    for (std::string& name : names) name = folder_ + "/" + name;
    return names;
  }

  std::string folder_;
};

TEST_F(FilesAtTest, AFileStandsForItself) {
  EXPECT_EQ(*FilesAt(folder_ + "/c.bin"), Paths({"c.bin"}));
}

TEST_F(FilesAtTest, AFolderStandsForTheFilesInItByName) {
  EXPECT_EQ(*FilesAt(folder_), Paths({"B.txt", "a.txt", "b.txt", "c.bin"}));
}

TEST_F(FilesAtTest, APatternStandsForTheFilesThatMatchByName) {
  EXPECT_EQ(*FilesAt(folder_ + "/*.txt"), Paths({"B.txt", "a.txt", "b.txt"}));
  EXPECT_EQ(*FilesAt(folder_ + "/[ab].*"), Paths({"a.txt", "b.txt"}));
  EXPECT_EQ(*FilesAt(folder_ + "/b*"), Paths({"b.txt"}));  // Not the folder.
  EXPECT_EQ(*FilesAt(folder_ + "/*/?.txt"), Paths({"below/d.txt"}));
}

TEST_F(FilesAtTest, AFileWhoseNameLooksLikeAPatternIsThatFile) {
  std::ofstream(folder_ + "/[a].txt") << "x";
  EXPECT_EQ(*FilesAt(folder_ + "/[a].txt"), Paths({"[a].txt"}));
}

TEST_F(FilesAtTest, SaysWhatIsMissing) {
  EXPECT_EQ(FilesAt(folder_ + "/x").status(),
            absl::NotFoundError("no such file or folder: " + folder_ + "/x"));
  EXPECT_EQ(FilesAt(folder_ + "/x*").status(),
            absl::NotFoundError("no file matches " + folder_ + "/x*"));
  EXPECT_EQ(FilesAt("").status(), absl::NotFoundError("no such file or folder: "));
  std::filesystem::create_directories(folder_ + "/empty");
  EXPECT_EQ(FilesAt(folder_ + "/empty").status(),
            absl::NotFoundError("no file in the folder " + folder_ + "/empty"));
}

TEST_F(FilesAtTest, RefusesWhatIsNeitherFileNorFolder) {
  ASSERT_EQ(mkfifo((folder_ + "/pipe").c_str(), 0600), 0);
  EXPECT_EQ(FilesAt(folder_ + "/pipe").status(),
            absl::InvalidArgumentError(folder_ + "/pipe is neither a file nor a folder"));
  EXPECT_EQ(*FilesAt(folder_ + "/[pc]*"), Paths({"c.bin"}));
  EXPECT_TRUE(absl::IsNotFound(FilesAt(folder_ + "/c.bin/x").status()));
  EXPECT_FALSE(FilesAt(std::string(5000, 'x')).ok());
}

}  // namespace
}  // namespace evenkeel
