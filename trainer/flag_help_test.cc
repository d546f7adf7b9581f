#include "evenkeel/trainer/flag_help.h"

#include <gflags/gflags.h>
#include <gtest/gtest.h>

#include <vector>

DEFINE_int32(test_count, 3, "how many");
DEFINE_bool(test_loud, true, "say it loudly");
DEFINE_string(test_file, "", "=FILE where it goes");
DEFINE_string(test_kind, "", "=K a or b (default: what fits)");

namespace evenkeel {
namespace {

TEST(FlagHelpTest, HasALinePerFlagUnderItsGroup) {
  const std::vector<FlagGroup> groups = {{"Numbers", {"test_count", "test_loud"}},
                                         {"Texts", {"test_file", "test_kind"}}};
  EXPECT_EQ(FlagHelp(groups),
            "Numbers:\n"
            "  --test_count=N    how many (default 3)\n"
            "  --[no]test_loud   say it loudly (default on)\n"
            "\n"
            "Texts:\n"
            "  --test_file=FILE  where it goes (default none)\n"
            "  --test_kind=K     a or b (default: what fits)\n");
}

TEST(FlagHelpTest, SaysThatAFlagDoesNotExist) {
  const std::vector<FlagGroup> groups = {{"Ghosts", {"test_ghost"}}};
  EXPECT_EQ(FlagHelp(groups), "Ghosts:\n  test_ghost  is not defined\n");
}

}  // namespace
}  // namespace evenkeel
