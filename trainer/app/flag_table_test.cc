#include "evenkeel/trainer/app/flag_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace evenkeel {
namespace {

struct Flags {
  int32_t count = 3;
  bool loud = true;
  std::string file;
  std::optional<std::string> kind;
  std::optional<double> rate;
};

struct Program {
  Flags flags;
  FlagTable table;

  Program() {
    table.Group("Numbers");
    table.Add("test_count", flags.count, "how many");
    table.Add("test_loud", flags.loud, "say it loudly");
    table.Add("test_rate", flags.rate, 0.5, "how fast");
    table.Group("Texts");
    table.Add("test_file", flags.file, "=FILE where it goes");
    table.Add("test_kind", flags.kind, {}, "=K a or b (default: what fits)");
  }
};

// gflags knows a flag as long as the process lives.
Program& TheProgram() {
  static Program* const program = new Program;
  return *program;
}

TEST(FlagTableTest, HelpHasALinePerFlagUnderItsGroup) {
  EXPECT_EQ(TheProgram().table.Help(),
            "Numbers:\n"
            "  --test_count=N    how many (default 3)\n"
            "  --[no]test_loud   say it loudly (default on)\n"
            "  --test_rate=X     how fast (default 0.5)\n"
            "\n"
            "Texts:\n"
            "  --test_file=FILE  where it goes (default none)\n"
            "  --test_kind=K     a or b (default: what fits)\n");
}

TEST(FlagTableTest, ParsingSetsWhatIsGivenAndLeavesTheRest) {
  std::string arguments[] = {"program", "--notest_loud", "--test_kind=b"};
  char* argv[] = {arguments[0].data(), arguments[1].data(), arguments[2].data(), nullptr};
  Program& program = TheProgram();
  const absl::StatusOr<bool> runs = program.table.Parse("", 3, argv);
  ASSERT_TRUE(runs.ok()) << runs.status();
  EXPECT_TRUE(*runs);
  EXPECT_EQ(program.flags.count, 3);
  EXPECT_FALSE(program.flags.loud);
  EXPECT_EQ(program.flags.kind, "b");
  EXPECT_EQ(program.flags.rate, std::nullopt);
}

// Returns the error of a command line.
std::string ErrorOf(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const absl::StatusOr<bool> runs =
      TheProgram().table.Parse("", static_cast<int>(arguments.size()), argv.data());
  return std::string(runs.status().message());
}

TEST(FlagTableTest, UnknownFlagsAreNamedWithTheMostSimilarOne) {
  EXPECT_EQ(ErrorOf({"--test_cuont=4"}),
            "unknown flag --test_cuont; did you mean --test_count? see --help");
  EXPECT_EQ(ErrorOf({"-test_fil", "x"}),
            "unknown flag --test_fil; did you mean --test_file? see --help");
  EXPECT_EQ(ErrorOf({"--something"}), "unknown flag --something; see --help");
  EXPECT_EQ(ErrorOf({"--notest_count"}),
            "unknown flag --notest_count; did you mean --test_count? see --help");
  EXPECT_EQ(ErrorOf({"--=3"}), "unknown flag --; see --help");
  // Values that look like flags.
  EXPECT_EQ(ErrorOf({"--test_kind", "--a", "--test_loud", "--test_rate", "-0.5"}), "");
  EXPECT_EQ(ErrorOf({"--test_kind=--a"}), "");
  EXPECT_EQ(ErrorOf({"-"}), "unexpected argument \"-\"; see --help");
}

}  // namespace
}  // namespace evenkeel
