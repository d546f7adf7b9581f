#include "evenkeel/tools/installation/needed_headers.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

absl::StatusOr<Headers> Needed(const Headers& all, const std::vector<std::string>& public_headers) {
  return NeededHeaders(public_headers,
                       [&](const std::string& header) -> absl::StatusOr<std::string> {
                         const auto found = all.find(header);
                         if (found == all.end()) return absl::NotFoundError("there is none");
                         return found->second;
                       });
}

TEST(NeededHeadersTest, FollowsIncludesAtAnyDepthAndInCircles) {
  const Headers all = {
      {"evenkeel/a.h",
       "// a\n#include <vector>\n#include \"absl/status/status.h\"\n#include \"evenkeel/b.h\"\n"},
      {"evenkeel/b.h", "  #  include   \"evenkeel/internal/c.h\"  // why\n"},
      {"evenkeel/internal/c.h", "#include <evenkeel/a.h>"},
      {"evenkeel/unused.h", ""},
  };
  const absl::StatusOr<Headers> headers = Needed(all, {"evenkeel/a.h"});
  ASSERT_TRUE(headers.ok()) << headers.status();
  EXPECT_THAT(*headers,
              ElementsAre(Pair("evenkeel/a.h", all.at("evenkeel/a.h")),
                          Pair("evenkeel/b.h", all.at("evenkeel/b.h")),
                          Pair("evenkeel/internal/c.h", all.at("evenkeel/internal/c.h"))));
}

TEST(NeededHeadersTest, AnIncludeInACommentIsNone) {
  const absl::StatusOr<Headers> headers =
      Needed({{"evenkeel/a.h", "//   #include \"evenkeel/b.h\"\n#define X \"evenkeel/c.h\"\n"}},
             {"evenkeel/a.h"});
  ASSERT_TRUE(headers.ok()) << headers.status();
  EXPECT_EQ(headers->size(), 1u);
}

TEST(NeededHeadersTest, WhatIsMissingIsNamedWithWhoIncludesIt) {
  const absl::StatusOr<Headers> headers =
      Needed({{"evenkeel/a.h", "#include \"evenkeel/b.h\""}}, {"evenkeel/a.h"});
  EXPECT_EQ(headers.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(headers.status().message(), HasSubstr("evenkeel/b.h, included by evenkeel/a.h"));
}

TEST(NeededHeadersTest, NothingNeedsNothing) {
  const absl::StatusOr<Headers> headers = Needed({}, {});
  ASSERT_TRUE(headers.ok());
  EXPECT_TRUE(headers->empty());
}

}  // namespace
}  // namespace evenkeel
