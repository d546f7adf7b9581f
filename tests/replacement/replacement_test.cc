// Kills ranks of a job of processes while they train, starts newcomers in their places, and
// compares the end with that of the undisturbed job, bit for bit.

#include <signal.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/replacement/replaced_job.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kRanks = ReplacedJob::kRanks;

std::string Undisturbed(int steps) {
  ReplacedJob job(steps, 0);
  EXPECT_TRUE(job.Listen(absl::Seconds(60)));
  const std::vector<std::string> ends = job.Ends();
  EXPECT_THAT(ends, testing::Each(ends[0]));
  return ends[0];
}

TEST(ReplacementTest, EndsAsIfNoRankHadBeenLost) {
  constexpr int kSteps = 400;
  const std::string expected = Undisturbed(kSteps);
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  ReplacedJob job(kSteps, 2000);
  job.AwaitSteps();
  int kills = 0;
  for (; kills < 10 && !job.HasBegunToEnd(); ++kills) {
    if (job.Listen(absl::Milliseconds(20 + random() % 300)) || job.HasBegunToEnd()) break;
    const int place = static_cast<int>(random() % kRanks);
    if (job.IsLastWithState(place)) continue;
    job.Kill(place);
    job.StartPlace(place);
  }
  EXPECT_TRUE(job.Listen(absl::Seconds(60))) << "last: " << job.last_line();
  EXPECT_THAT(job.Ends(), testing::Each(expected));
  EXPECT_GE(kills, 3);
  EXPECT_GE(job.recovered().size(), 3);
  EXPECT_THAT(job.recovered(), testing::Each(testing::HasSubstr("of 4 with")));
}

// Newcomers are killed at any moment, too: while they start, enter, and receive the state.
TEST(ReplacementTest, NewcomersMayDieAtAnyMoment) {
  constexpr int kSteps = 300;
  const std::string expected = Undisturbed(kSteps);
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed() + 1);
  ReplacedJob job(kSteps, 1000);
  for (int place = 0; place < kRanks; ++place) {
    job.AwaitSteps();
    ASSERT_FALSE(job.HasBegunToEnd());
    job.Kill(place);
    for (int newcomer = 0; newcomer < 4; ++newcomer) {
      job.StartPlace(place);
      job.Listen(absl::Microseconds(random() % 60'000));
      job.Kill(place);
    }
    job.StartPlace(place);
  }
  EXPECT_TRUE(job.Listen(absl::Seconds(60))) << "last: " << job.last_line();
  EXPECT_THAT(job.Ends(), testing::Each(expected));
}

TEST(ReplacementTest, ANewcomerThatDoesNotFitIsRefusedAndTheOthersGoOn) {
  constexpr int kSteps = 100;
  const std::string expected = Undisturbed(kSteps);
  ReplacedJob job(kSteps, 5000);
  job.AwaitSteps();
  job.Kill(1);
  job.StartPlace(1, {{"REPLACEMENT_SIZE", "501"}});
  EXPECT_THAT(job.ComplaintOf(1),
              testing::AllOf(testing::HasSubstr("parameter 3"), testing::HasSubstr("[501]"),
                             testing::HasSubstr("[500]"), testing::HasSubstr("rank 1")));
  job.StartPlace(1, {{"EVENKEEL_SECRET", "another"}});
  EXPECT_THAT(job.ComplaintOf(1), testing::HasSubstr("secret"));
  job.StartPlace(1, {{"REPLACEMENT_STEP", "1"}});
  EXPECT_THAT(job.ComplaintOf(1), testing::HasSubstr("call Enter() first"));
  job.StartPlace(1, {{"EVENKEEL_NEWCOMER", "1"}});
  EXPECT_THAT(job.ComplaintOf(1), testing::HasSubstr("number 1 in the place of rank 1 is refused"));
  job.StartPlace(1);
  EXPECT_TRUE(job.Listen(absl::Seconds(60))) << "last: " << job.last_line();
  EXPECT_THAT(job.Ends(), testing::Each(expected));
}

TEST(ReplacementTest, TheLauncherStartsNewcomers) {
  constexpr int kSteps = 200;
  const std::string expected = Undisturbed(kSteps);
  ChildProcesses launcher;
  ASSERT_TRUE(launcher
                  .Start({"tools/launch", absl::StrCat("--nproc=", kRanks), "--on_failure=replace",
                          "--", ReplacementRank(), absl::StrCat(kSteps), "5000"},
                         {})
                  .ok());
  std::vector<int> processes;
  std::vector<std::string> newcomers, ends;
  int kills = 0;
  EXPECT_TRUE(launcher.Listen(absl::Now() + absl::Seconds(60), [&](int, absl::string_view line) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words[0] == "process") {
      processes.push_back(std::stoi(words[1]));
      if (words[3] != "0") newcomers.push_back(words[3]);
    }
    if (words[0] == "done") ends.push_back(words[1]);
    // The first process, then the newcomer in its place, a few steps later.
    const bool is_time = words[0] == "step" && std::stoi(words[1]) >= 20 * (kills + 1);
    if (kills < 2 && is_time && processes.size() >= static_cast<size_t>(kRanks + kills))
      kill(kills++ == 0 ? processes.front() : processes.back(), SIGKILL);
  }));
  EXPECT_EQ(launcher.exit_code(0), 0) << launcher.complaints(0);
  EXPECT_THAT(launcher.complaints(0), testing::HasSubstr("and were replaced"));
  EXPECT_THAT(newcomers, testing::ElementsAre("1", "2"));
  EXPECT_THAT(ends, testing::AllOf(testing::SizeIs(kRanks), testing::Each(expected)));
}

// Newcomers of a place that the group has given up are refused, and the others train on.
TEST(ReplacementTest, TheLauncherLeavesPlacesThatAreGivenUp) {
  ChildProcesses launcher;
  ASSERT_TRUE(launcher
                  .Start({"tools/launch", absl::StrCat("--nproc=", kRanks), "--on_failure=replace",
                          "--patience_s=0.5", "--", ReplacementRank(), "300", "5000"},
                         {{"REPLACEMENT_WAIT_S", "0"}})
                  .ok());
  int processes = 0, ends = 0, first = 0;
  EXPECT_TRUE(launcher.Listen(absl::Now() + absl::Seconds(60), [&](int, absl::string_view line) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words[0] == "process" && ++processes == 1) first = std::stoi(words[1]);
    ends += words[0] == "done";
    if (words[0] == "step" && std::stoi(words[1]) == 10 && first > 0)
      kill(std::exchange(first, 0), SIGKILL);
  }));
  EXPECT_EQ(launcher.exit_code(0), 0) << launcher.complaints(0);
  EXPECT_EQ(ends, kRanks - 1);
  EXPECT_LE(processes, kRanks + 3) << launcher.complaints(0);
  EXPECT_THAT(launcher.complaints(0), testing::HasSubstr("comes too late"));
}

TEST(ReplacementTest, OneThatComesTooLateIsRefused) {
  ReplacedJob job(/*steps=*/200, 5000, {{"REPLACEMENT_WAIT_S", "0"}});
  job.AwaitSteps();
  job.Kill(3);
  while (job.recovered().size() < 3) ASSERT_FALSE(job.Listen(absl::Milliseconds(10)));
  EXPECT_THAT(job.recovered(), testing::Each(testing::HasSubstr("of 3 with 0")));
  job.StartPlace(3);
  EXPECT_THAT(job.ComplaintOf(3), testing::HasSubstr("rank 3 comes too late"));
  EXPECT_TRUE(job.Listen(absl::Seconds(60)));
}

TEST(ReplacementTest, ASplitStateIsNotReplaced) {
  ReplacedJob job(/*steps=*/1000, 5000, {{"REPLACEMENT_SHARDED", "1"}});
  job.AwaitSteps();
  job.Kill(3);
  job.StartPlace(3);
  EXPECT_TRUE(job.Listen(absl::Seconds(60)));
  EXPECT_THAT(job.Ends(), testing::Each(testing::HasSubstr("use the placement Replicated")));
}

}  // namespace
}  // namespace evenkeel
