#include "evenkeel/tools/installation/libraries_file.h"

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::Pair;

constexpr char kText[] = R"({
  "archives": [{"part": "join", "file": "b/libevenkeel_join.a"}, {"part": "comm", "file": "b/libevenkeel_comm.a"}],
  "headers": [{"include": "evenkeel/join/join.h", "file": "join/v/join.h"}],
  "public_headers": ["evenkeel/join/join.h"],
  "programs": ["tools/launch"],
  "abseil": ["status", "strings"],
  "link_flags": ["-lrt"]
})";

TEST(LibrariesFileTest, SaysWhatTheRuleHasCollected) {
  const absl::StatusOr<LibrariesFile> libraries = ReadLibrariesFile(kText);
  ASSERT_TRUE(libraries.ok()) << libraries.status();
  ASSERT_EQ(libraries->archives.size(), 2u);
  EXPECT_EQ(libraries->archives[0].part, "join");
  EXPECT_EQ(libraries->archives[1].file, "b/libevenkeel_comm.a");
  EXPECT_THAT(libraries->headers, ElementsAre(Pair("evenkeel/join/join.h", "join/v/join.h")));
  EXPECT_THAT(libraries->public_headers, ElementsAre("evenkeel/join/join.h"));
  EXPECT_THAT(libraries->programs, ElementsAre("tools/launch"));
  EXPECT_THAT(libraries->abseil, ElementsAre("status", "strings"));
  EXPECT_THAT(libraries->link_flags, ElementsAre("-lrt"));
}

TEST(LibrariesFileTest, RefusesEveryBeginningOfAFile) {
  const std::string text = kText;
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_EQ(ReadLibrariesFile(text.substr(0, size)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
}

TEST(LibrariesFileTest, RefusesAListWithoutOneOfItsParts) {
  for (const char* text :
       {"[]", "{}", R"({"archives": [{"part": 3, "file": "x"}]})", R"({"archives": ["x"]})"}) {
    EXPECT_EQ(ReadLibrariesFile(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace evenkeel
