// A rank that is killed in the middle of training ends the whole run: soon, with its number, and
// with nothing left running.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

class FaultsTest : public testing::Test {
 protected:
  // A run that would go on for hours, after its first steps. Its processes have `mark` in their
  // command lines.
  FaultsTest() : mark_(TempPath(absl::StrCat("faults", number_++, ".jsonl"))) {}

  std::vector<std::string> Command(int ranks) const {
    return {kTrain,
            "--model=mlp",
            BackendFlagOfProcesses(),
            absl::StrCat("--nproc=", ranks),
            "--batch_size=4",
            "--epochs=1000000",
            "--data=" + WriteSmallData("data", {.train = 240, .test = 10}),
            "--metrics=" + mark_};
  }

  // Whether the run came so far before it ended.
  bool WaitForSteps(size_t steps) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (Lines(ReadText(mark_)).size() < steps) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return true;
  }

  void ExpectNothingIsLeft() const { EXPECT_THAT(ProcessesWith(mark_), IsEmpty()); }

  static int number_;
  const std::string mark_;
};

int FaultsTest::number_ = 0;

struct Killed {
  int ranks;
  int rank;
};

class KilledRankTest : public FaultsTest, public testing::WithParamInterface<Killed> {};

TEST_P(KilledRankTest, EndsTheOthersAndIsNamed) {
  const auto [ranks, rank] = GetParam();
  Program program(Command(ranks));
  ASSERT_TRUE(WaitForSteps(20));
  const pid_t victim = PidOfRank(mark_, rank);
  ASSERT_GT(victim, 0);
  const absl::Time start = absl::Now();
  ASSERT_EQ(kill(victim, SIGKILL), 0);
  const Ended ended = program.Wait();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_FALSE(ended.timed_out);
  EXPECT_EQ(ended.code, 128 + SIGKILL);
  EXPECT_THAT(ended.out, Not(HasSubstr("test_accuracy")));
  SCOPED_TRACE(ended.err);
  // The process that started them, and each survivor once.
  EXPECT_THAT(ended.err, HasSubstr(absl::StrCat("train: rank ", rank, " was killed by SIGKILL\n")));
  EXPECT_THAT(Lines(ended.err), SizeIs(ranks));
  for (int other = 0; other < ranks; ++other) {
    if (other == rank) continue;
    const std::vector<std::string> lines = Lines(ended.err);
    const auto line = std::ranges::find_if(lines, [other = other](const std::string& text) {
      return absl::StartsWith(text, absl::StrCat("train: rank ", other, ": "));
    });
    ASSERT_NE(line, lines.end()) << "rank " << other;
    EXPECT_THAT(*line, HasSubstr(absl::StrCat("rank ", rank)));
  }
  ExpectNothingIsLeft();
}

INSTANTIATE_TEST_SUITE_P(Ranks, KilledRankTest,
                         testing::Values(Killed{2, 0}, Killed{2, 1}, Killed{5, 3}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.rank, "Of", info.param.ranks);
                         });

TEST_F(FaultsTest, AKilledStarterTakesItsRanksWithIt) {
  Program program(Command(2));
  ASSERT_TRUE(WaitForSteps(20));
  ASSERT_EQ(kill(program.pid(), SIGKILL), 0);
  EXPECT_EQ(program.Wait().code, 128 + SIGKILL);
  const absl::Time deadline = absl::Now() + absl::Seconds(5);
  while (!ProcessesWith(mark_).empty() && absl::Now() < deadline)
    absl::SleepFor(absl::Milliseconds(10));
  ExpectNothingIsLeft();
}

TEST_F(FaultsTest, ATerminatedRunEnds) {
  Program program(Command(2));
  ASSERT_TRUE(WaitForSteps(20));
  ASSERT_EQ(kill(program.pid(), SIGTERM), 0);
  const Ended ended = program.Wait();
  EXPECT_NE(ended.code, 0);
  EXPECT_FALSE(ended.timed_out);
  ExpectNothingIsLeft();
}

}  // namespace
}  // namespace evenkeel
