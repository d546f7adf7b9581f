#include "evenkeel/files/mapped_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"

namespace evenkeel {
namespace {

std::string PathOf(const std::string& name) { return testing::TempDir() + "/" + name; }

TEST(MappedFileTest, ShowsTheWholeFileWhereverItIsMovedTo) {
  const std::string contents(100'001, 'x');
  std::ofstream(PathOf("file")) << contents;
  absl::StatusOr<MappedFile> file = MapFile(PathOf("file"));
  ASSERT_TRUE(file.ok()) << file.status();
  const absl::string_view bytes = **file;
  const MappedFile moved = *std::move(file);
  EXPECT_EQ(moved->data(), bytes.data());
  EXPECT_EQ(bytes, contents);
}

TEST(MappedFileTest, AnEmptyFileHasNoBytes) {
  std::ofstream(PathOf("empty")) << "";
  EXPECT_EQ(**MapFile(PathOf("empty")), "");
}

TEST(MappedFileTest, SaysWhatItCannotMap) {
  const absl::Status missing = MapFile(PathOf("missing")).status();
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
  EXPECT_TRUE(absl::StrContains(missing.message(), "cannot open " + PathOf("missing"))) << missing;
  EXPECT_EQ(MapFile(testing::TempDir()).status(),
            absl::InvalidArgumentError(testing::TempDir() + " is not a regular file"));
  mkfifo(PathOf("pipe").c_str(), 0600);
  EXPECT_EQ(MapFile(PathOf("pipe")).status(),
            absl::InvalidArgumentError(PathOf("pipe") + " is not a regular file"));
}

}  // namespace
}  // namespace evenkeel
