// Runs seeds of the simulation: each must end as it should, in the same way each time. The mutants
// in tests/mutants/simulation.txt show that the simulation finds defects.

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/child_processes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

struct Output {
  int exit_code = -1;
  std::vector<std::string> lines;
  std::string errors;
  std::string text() const { return absl::StrJoin(lines, "\n"); }
};

Output Simulate(const std::vector<std::string>& flags, const Variables& variables = {}) {
  ChildProcesses children;
  std::vector<std::string> command = {"tests/simulation/simulation"};
  command.insert(command.end(), flags.begin(), flags.end());
  const absl::Status started = children.Start(command, variables);
  EXPECT_TRUE(started.ok()) << started;
  Output output;
  EXPECT_TRUE(children.Listen(absl::Now() + absl::Minutes(10), [&](int, absl::string_view line) {
    output.lines.emplace_back(line);
  })) << children.complaints(0);
  output.exit_code = children.exit_code(0);
  output.errors = children.complaints(0);
  return output;
}

// The first tier has a tenth of the seeds, see few_seeds_test() of tools/build_defs.
bool HasFewSeeds() { return std::getenv("EVENKEEL_TEST_FEW_SEEDS") != nullptr; }

std::string Seeds(int all) { return absl::StrCat(HasFewSeeds() ? all / 10 : all); }

// 1,000 seeds and the backends to choose from; parts of similar length, for the shards.
struct Part {
  int first;
  std::string backends;
};

class SimulationPartTest : public testing::TestWithParam<Part> {};

TEST_P(SimulationPartTest, EverySeedEndsAsItMust) {
  const Output output =
      Simulate({absl::StrCat("--first=", GetParam().first), absl::StrCat("--seeds=", Seeds(1000)),
                absl::StrCat("--backends=", GetParam().backends), "--most_failures=3"});
  EXPECT_EQ(output.exit_code, 0) << output.text();
  EXPECT_THAT(output.text(), HasSubstr(absl::StrCat(Seeds(1000), " seeds: 0 failed")));
}

INSTANTIATE_TEST_SUITE_P(All, SimulationPartTest,
                         testing::Values(Part{0, "tcp"}, Part{1000, "tcp"},
                                         Part{2000, "shm,hierarchical"}));

TEST(SimulationTest, TrainingsGoOnAfterLosses) {
  const Output output = Simulate({absl::StrCat("--seeds=", Seeds(400)), "--play=elastic",
                                  "--most_failures=3", "--backends=tcp,shm,hierarchical"});
  EXPECT_EQ(output.exit_code, 0) << output.text();
}

TEST(SimulationTest, TrainingsGoOnWithNewcomers) {
  const Output output = Simulate({absl::StrCat("--seeds=", Seeds(600)), "--play=replace",
                                  "--most_failures=3", "--backends=tcp,shm,hierarchical"});
  EXPECT_EQ(output.exit_code, 0) << output.text();
}

TEST(SimulationTest, SharesAreEqualEverywhereAndFollowTheSpeeds) {
  const Output output = Simulate({absl::StrCat("--seeds=", Seeds(150)), "--play=balance",
                                  "--most_failures=3", "--backends=tcp,shm,hierarchical"});
  EXPECT_EQ(output.exit_code, 0) << output.text();
}

TEST(SimulationTest, ManyRanksEndAsTheyMust) {
  const Output output = Simulate({absl::StrCat("--seeds=", HasFewSeeds() ? 2 : 8),
                                  "--worlds=33,48"});  // With a tree of exchanges.
  EXPECT_EQ(output.exit_code, 0) << output.text();
}

TEST(SimulationTest, AThousandRanksEndAsTheyMust) {
  if (HasFewSeeds()) GTEST_SKIP() << "few seeds: the second tier has this world";
  const Output output = Simulate({"--seeds=1", "--worlds=1024"});
  EXPECT_EQ(output.exit_code, 0) << output.text();
}

TEST(SimulationTest, ASeedIsTheSameRunEachTime) {
  const auto hashes = [](const Output& output) {
    EXPECT_EQ(output.exit_code, 0) << output.text();
    std::set<std::string> hashes;  // In any order.
    for (const std::string& line : output.lines) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      if (words.size() > 2 && words[1].size() == 16) hashes.insert(words[0] + " " + words[1]);
    }
    return hashes;
  };
  const std::vector<std::string> flags = {absl::StrCat("--seeds=", Seeds(200)), "--hashes",
                                          "--backends=tcp,shm,hierarchical"};
  const std::set<std::string> first = hashes(Simulate(flags));
  EXPECT_EQ(absl::StrCat(first.size()), Seeds(200));
  // Addresses are others each time; here, freed memory has other contents, too.
  const Variables others = {
      {"GLIBC_TUNABLES", "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0"},
      {"EVENKEEL_VERIFY", "every"}};
  EXPECT_EQ(hashes(Simulate(flags, others)), first);
}

TEST(SimulationTest, AWrongFlagIsASentence) {
  Output output = Simulate({"--worlds=1,x"});
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_EQ(output.errors,
            "simulation: --worlds=1,x: give numbers of ranks from 2 to 4096, separated by "
            "commas\n");
  output = Simulate({"--backends=tcp,x"});
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_EQ(output.errors,
            "simulation: --backends=tcp,x: give tcp, shm or hierarchical, separated by commas\n");
}

}  // namespace
}  // namespace evenkeel
