// Compares docs/tutorial.md and docs/your_loop.md with the programs: their code is in these, and
// the output that the tutorial shows is theirs. The programs also compute the promised results, on
// any number of ranks. docs/clusters.md shows the batch script as it is.

#include <stdio.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

constexpr char kFolder[] = "examples/";

std::string Read(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Outcome {
  bool succeeded = false;
  std::vector<std::string>
      lines;  // In order of the alphabet: ranks do not wait for each other to print.
};

Outcome RunCommand(const std::string& command) {
  Outcome outcome;
  FILE* const pipe = popen(absl::StrCat(command, " 2>&1").c_str(), "r");
  std::string output;
  for (int c; (c = fgetc(pipe)) != EOF;) output.push_back(static_cast<char>(c));
  outcome.succeeded = pclose(pipe) == 0;
  outcome.lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  std::sort(outcome.lines.begin(), outcome.lines.end());
  return outcome;
}

Outcome Launch(int ranks, const std::string& program) {
  return RunCommand(absl::StrCat("tools/launch --nproc=", ranks, " -- ", kFolder, program));
}

// The number behind "name=" in a line; NaN if there is none.
double Value(absl::string_view line, absl::string_view name) {
  for (absl::string_view word : absl::StrSplit(line, ' ')) {
    double value;
    if (absl::ConsumePrefix(&word, absl::StrCat(name, "=")) && absl::SimpleAtod(word, &value))
      return value;
  }
  return NAN;
}

// ---- What the page shows ----

struct Block {
  std::string language;
  std::string program;  // The file that the text before it linked last.
  std::string text;
};

std::vector<Block> BlocksOf(const std::string& page) {
  std::vector<Block> blocks;
  std::string program;
  bool is_inside = false;
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    if (absl::ConsumePrefix(&line, "```")) {
      is_inside = !is_inside;
      if (is_inside) blocks.push_back({std::string(line), program, ""});
    } else if (is_inside) {
      absl::StrAppend(&blocks.back().text, line, "\n");
    } else if (absl::StartsWith(line, absl::StrCat("[", kFolder))) {
      program = std::string(line.substr(1, line.find(']') - 1));
    }
  }
  EXPECT_FALSE(is_inside);
  return blocks;
}

// Each block of a page in the program that it names; returns their number.
int CheckQuotes(const std::string& page) {
  int quotes = 0;
  for (const Block& block : BlocksOf(Read(page))) {
    if (block.language != "cpp") continue;
    ++quotes;
    EXPECT_TRUE(
        absl::StrContains(absl::StrCat("\n", Read(block.program)), absl::StrCat("\n", block.text)))
        << block.program << " does not have\n"
        << block.text;
  }
  return quotes;
}

TEST(TutorialTest, QuotesThePrograms) {
  EXPECT_EQ(CheckQuotes("docs/tutorial.md"), 7);
  EXPECT_EQ(CheckQuotes("docs/your_loop.md"), 12);
}

TEST(YourLoopTest, AProgramInCpp14Trains) {
  const Outcome outcome = Launch(2, "cxx14_program");
  EXPECT_TRUE(outcome.succeeded);
  ASSERT_THAT(outcome.lines, SizeIs(2));
  EXPECT_EQ(outcome.lines[0], outcome.lines[1]);
  EXPECT_NEAR(Value(outcome.lines[0], "slope"), 2, 1e-3);
}

TEST(ClustersTest, ShowsTheBatchScript) {
  EXPECT_THAT(Read("docs/clusters.md"),
              HasSubstr(absl::StrCat("```bash\n", Read("examples/train.sbatch"), "```\n")));
}

TEST(ReadmeTest, QuotesAProgram) {
  const std::string program = Read("examples/readme_loop.cc");
  int quotes = 0;
  for (const Block& block : BlocksOf(Read("README.md"))) {
    const std::vector<std::string> parts = absl::StrSplit(block.text, absl::MaxSplits("\n\n", 1));
    if (block.language != "cpp" || parts.size() < 2) continue;  // Behind the includes is the code.
    ++quotes;
    EXPECT_TRUE(absl::StrContains(program, parts[1])) << parts[1];
    for (const absl::string_view line : absl::StrSplit(parts[0], '\n')) {
      const absl::string_view include = line.substr(0, line.find(' ', sizeof("#include")));
      EXPECT_TRUE(absl::StrContains(program, include)) << include;
    }
  }
  EXPECT_EQ(quotes, 1);
}

TEST(ReadmeTest, TheProgramTrainsAndRefusesANan) {
  const Outcome good = Launch(3, "readme_loop");
  EXPECT_TRUE(good.succeeded);
  ASSERT_THAT(good.lines, SizeIs(3));
  for (const std::string& line : good.lines)
    EXPECT_EQ(Value(line, "slope"), Value(good.lines[0], "slope")) << line;
  const Outcome bad = Launch(3, "readme_loop nan");
  EXPECT_FALSE(bad.succeeded);
  int refusals = 0;
  for (const std::string& line : bad.lines) {
    refusals += absl::StrContains(line, "a gradient is infinite or not a number");
  }
  EXPECT_GE(refusals, 3) << absl::StrJoin(bad.lines, "\n");
}

TEST(TutorialTest, ShowsWhatTheProgramsPrint) {
  int commands = 0;
  for (const Block& block : BlocksOf(Read("docs/tutorial.md"))) {
    if (block.language != "console" || absl::StrContains(block.text, "bazelw build")) continue;
    for (absl::string_view session : absl::StrSplit(absl::StripPrefix(block.text, "$ "), "\n$ ")) {
      std::vector<std::string> shown = absl::StrSplit(session, '\n', absl::SkipEmpty());
      const std::string command =
          absl::StrReplaceAll(shown[0], {{"./bazelw run //tools:launch --", "tools/launch"},
                                         {"./bazelw run //examples:", kFolder},
                                         {"bazel-bin/", ""}});
      shown.erase(shown.begin());
      EXPECT_EQ(absl::StrJoin(RunCommand(command).lines, "\n"), absl::StrJoin(shown, "\n"))
          << command;
      ++commands;
    }
  }
  EXPECT_EQ(commands, 6);
}

// ---- What it promises ----

// Two ranks that add up in another order than one differ in the last bits of a float, far below the
// digits printed; a sample with another weight, or one left out, changes the fourth.
constexpr double kRounding = 1.5e-6;

TEST(TutorialTest, RanksThatShareEveryBatchGetWhatOneGets) {
  const Outcome alone = RunCommand(absl::StrCat(kFolder, "step2_data_parallel"));
  ASSERT_THAT(alone.lines, SizeIs(1));
  for (int ranks : {1, 2, 3}) {
    const Outcome outcome = Launch(ranks, "step2_data_parallel");
    EXPECT_TRUE(outcome.succeeded);
    ASSERT_THAT(outcome.lines, SizeIs(ranks));
    for (const std::string& line : outcome.lines) {
      EXPECT_NEAR(Value(line, "loss"), Value(alone.lines[0], "loss"), kRounding) << line;
    }
  }
}

TEST(TutorialTest, EverySampleWeighsTheSameOnAnyNumberOfRanks) {
  const Outcome own = RunCommand(absl::StrCat(kFolder, "step1_own_loop"));
  ASSERT_THAT(own.lines, SizeIs(1));
  for (const std::string program : {"step3_join", "step4_zero"}) {
    for (int ranks : {1, 2, 3, 5}) {
      SCOPED_TRACE(absl::StrCat(program, " on ", ranks));
      const Outcome outcome = Launch(ranks, program);
      EXPECT_TRUE(outcome.succeeded);
      ASSERT_THAT(outcome.lines, SizeIs(ranks));
      double state_bytes = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::string& line = outcome.lines[rank];
        EXPECT_NEAR(Value(line, "loss"), Value(own.lines[0], "loss"), kRounding) << line;
        EXPECT_EQ(Value(line, "steps"), rank == 0 ? 63 : 60) << line;
        state_bytes += Value(line, "state_bytes");
      }
      EXPECT_EQ(state_bytes, program == "step4_zero" ? 1024 : 1024 * ranks);
    }
  }
}

TEST(TutorialTest, AFailureReachesEveryRank) {
  const Outcome outcome = Launch(5, "step2_data_parallel");
  EXPECT_FALSE(outcome.succeeded);
  ASSERT_THAT(outcome.lines, SizeIs(6));  // Each rank's, and the launcher's.
  for (const std::string& line : outcome.lines) {
    if (absl::StartsWith(line, "launch: ")) continue;
    EXPECT_THAT(line, HasSubstr("5 ranks cannot share 48 samples evenly"));
  }
}

}  // namespace
}  // namespace evenkeel
