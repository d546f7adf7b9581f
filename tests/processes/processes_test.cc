// Ranks that are processes: one is killed in the middle of a step, or does not belong to the job.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tests/training/program.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr char kRank[] = "tests/processes/rank";
constexpr char kLaunch[] = "tools/launch";
constexpr int kAtOnceMillis = 5000;

using Variables = std::map<std::string, std::string>;

// A line of a rank's output: its time, and its text without time and rank.
struct Words {
  int64_t unix_millis = 0;
  std::string text;
};

// The last words of each rank.
std::map<int, Words> LastWords(const std::string& out) {
  std::map<int, Words> words;
  for (const std::string& line : Lines(out)) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 3));
    int rank = 0;
    Words said;
    if (parts.size() != 4 || !absl::SimpleAtoi(parts[0], &said.unix_millis) ||
        !absl::SimpleAtoi(parts[2], &rank)) {
      ADD_FAILURE() << "not from a rank: " << line;
      continue;
    }
    said.text = parts[3];
    words[rank] = said;
  }
  return words;
}

std::string NewFolder() {
  std::string pattern = testing::TempDir() + "/processesXXXXXX";
  return mkdtemp(pattern.data());
}

// Each rank started by hand, with these variables; rank 0 hosts the store.
std::vector<std::unique_ptr<Program>> Start(int world_size, int victim, const std::string& seconds,
                                            const std::map<int, Variables>& of_rank = {}) {
  const std::string store = NewFolder();
  std::vector<std::unique_ptr<Program>> programs;
  for (int rank = 0; rank < world_size; ++rank) {
    Variables variables = of_rank.contains(rank) ? of_rank.at(rank) : Variables{};
    variables.insert({{"RANK", absl::StrCat(rank)},
                      {"WORLD_SIZE", absl::StrCat(world_size)},
                      {"LOCAL_RANK", absl::StrCat(rank)},
                      {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
                      {"EVENKEEL_STORE", store}});
    programs.push_back(
        std::make_unique<Program>(std::vector<std::string>{kRank, absl::StrCat(victim), seconds},
                                  ProgramOptions{.environment = variables}));
  }
  return programs;
}

// All ranks but the victim end at once, with its number.
void ExpectAllNamed(int world_size, int victim, const std::string& out) {
  std::map<int, Words> words = LastWords(out);
  ASSERT_THAT(words, SizeIs(world_size)) << out;
  const int64_t death = words[victim].unix_millis;
  for (const auto& [rank, said] : words) {
    if (rank == victim) continue;
    EXPECT_THAT(said.text, AllOf(HasSubstr("UNAVAILABLE"), HasSubstr(absl::StrCat("rank ", victim)),
                                 HasSubstr(absl::StrCat("kind=lost ranks=", victim, " "))))
        << out;
    EXPECT_LT(said.unix_millis - death, kAtOnceMillis) << out;
  }
}

struct Loss {
  int world_size;
  int victim;
};

class LostRankTest : public testing::TestWithParam<Loss> {};

TEST_P(LostRankTest, IsNamedByAllOthersAndTheLauncher) {
  const auto [world_size, victim] = GetParam();
  const std::string mark = absl::StrCat("20.", getpid());  // Marks these processes' command lines.
  const Ended ended = evenkeel::Run(
      {kLaunch, absl::StrCat("--nproc=", world_size), "--", kRank, absl::StrCat(victim), mark});
  EXPECT_FALSE(ended.timed_out);
  EXPECT_EQ(ended.code, 128 + SIGKILL) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr(absl::StrCat("rank ", victim, " was killed by SIGKILL")));
  ExpectAllNamed(world_size, victim, ended.out);
  EXPECT_THAT(ProcessesWith(mark), IsEmpty());
}

// Rank 0 takes the store with it.
TEST_P(LostRankTest, IsNamedByAllOthersWhereRankZeroHostsTheStore) {
  const auto [world_size, victim] = GetParam();
  std::string out;
  for (const auto& program : Start(world_size, victim, "20")) {
    const Ended ended = program->Wait();
    EXPECT_FALSE(ended.timed_out);
    EXPECT_NE(ended.code, 0);
    out += ended.out;
  }
  ExpectAllNamed(world_size, victim, out);
}

INSTANTIATE_TEST_SUITE_P(, LostRankTest,
                         testing::Values(Loss{2, 0}, Loss{2, 1}, Loss{5, 0}, Loss{5, 3}),
                         [](const auto& info) {
                           return absl::StrCat("Rank", info.param.victim, "Of",
                                               info.param.world_size);
                         });

TEST(ProcessesTest, RunAndLeaveCleanly) {
  for (const int world_size : {1, 2, 5}) {
    const Ended ended =
        evenkeel::Run({kLaunch, absl::StrCat("--nproc=", world_size), "--", kRank, "-1", "20"});
    EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
    for (const auto& [rank, said] : LastWords(ended.out)) EXPECT_EQ(said.text, "ends: OK");
  }
  for (const auto& program : Start(3, -1, "20")) EXPECT_EQ(program->Wait().code, 0);
}

// Rank 1's last words, and that rank 0 could only say that it did not come.
std::string RefusalOfRankOne(const Variables& of_rank_one) {
  std::string refusal;
  auto programs =
      Start(2, -1, "1.5", {{0, {{"EVENKEEL_SECRET", "the right secret"}}}, {1, of_rank_one}});
  for (int rank : {0, 1}) {
    const Ended ended = programs[rank]->Wait();
    EXPECT_FALSE(ended.timed_out);
    EXPECT_NE(ended.code, 0);
    const std::string said = LastWords(ended.out)[rank].text;
    if (rank == 0) {
      EXPECT_THAT(said, HasSubstr("rank 1"));
    } else {
      refusal = said;
    }
  }
  return refusal;
}

TEST(ProcessesTest, AWrongSecretIsRefused) {
  EXPECT_THAT(RefusalOfRankOne({{"EVENKEEL_SECRET", "the wrong secret"}}),
              AllOf(HasSubstr("PERMISSION_DENIED"), HasSubstr("the secrets differ")));
}

TEST(ProcessesTest, AWrongWorldSizeIsRefused) {
  EXPECT_THAT(RefusalOfRankOne({{"EVENKEEL_SECRET", "the right secret"},
                                {"WORLD_SIZE", "3"},
                                {"LOCAL_WORLD_SIZE", "3"}}),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("has 3 ranks, but the job has 2")));
}

}  // namespace
}  // namespace evenkeel
