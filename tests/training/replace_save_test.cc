// Ranks that are killed while they save, with --on_failure=replace: the run, and those that are
// resumed from its checkpoints, end as if no rank had been lost, bit for bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/replaced_run.h"
#include "evenkeel/tests/training/small_data.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

using Flags = std::vector<std::string>;
using nlohmann::json;
using testing::HasSubstr;

constexpr int kRanks = ReplacedRun::kRanks;
// Some ranks have a batch more than others.
constexpr SmallData kData{.train = 60 * kRanks * 4 + 6, .test = 50};

Flags operator+(Flags flags, const Flags& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    names.push_back(at->path().filename());
  }
  std::ranges::sort(names);
  std::erase(names, ".lock");
  return names;
}

bool IsSaving(const std::string& folder) {
  return std::ranges::any_of(NamesIn(folder),
                             [](const auto& name) { return absl::StartsWith(name, ".saving-"); });
}

class ReplaceSaveTest : public testing::TestWithParam<std::string> {
 protected:
  ReplaceSaveTest()
      : flags_({"--model=" + GetParam(), "--data=" + WriteSmallData("data", kData)}),
        folder_(TempPath("checkpoints_" + GetParam())) {
    fs::remove_all(folder_);
  }

  // Each flush takes a few milliseconds, so that a save takes as long as some steps.
  ReplacedRun Saving(const Flags& more = {}) const {
    return ReplacedRun(
        flags_ + Flags{"--checkpoint_dir=" + folder_, "--checkpoint_every=7", "--keep=2"} + more,
        {.environment = {{"LD_PRELOAD", "tests/training/slow_disk.so"}, {"SLOW_DISK_MS", "3"}}});
  }

  // Kills ranks in saves, or after them; a half of them is rank 0, which publishes.
  int KillInSaves(const ReplacedRun& run, int most) {
    int kills = 0;
    for (size_t steps = 1; kills < most; steps += 1 + random_() % 12) {
      if (!run.WaitForSteps(steps)) break;
      const absl::Time deadline = absl::Now() + absl::Seconds(5);
      while (!IsSaving(folder_) && run.Events("test").empty() && absl::Now() < deadline)
        absl::SleepFor(absl::Milliseconds(1));
      absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 60000)));
      kills += run.Kill(random_() % 2 == 0 ? 0 : static_cast<int>(random_() % kRanks));
      steps = std::max(steps, run.Events("step").size());
    }
    return kills;
  }

  const Flags flags_;
  const std::string folder_;
  std::mt19937 random_{static_cast<uint32_t>(testing::UnitTest::GetInstance()->random_seed())};
};

TEST_P(ReplaceSaveTest, KillsInSavesChangeNothingNorDoesAStop) {
  const std::string whole_weights = TempPath("whole.safetensors"),
                    weights = TempPath("resumed.safetensors");
  ReplacedRun undisturbed(flags_ + Flags{"--save=" + whole_weights});
  const Ended whole = undisturbed.Wait();
  ASSERT_EQ(whole.code, 0) << whole.err;

  int kills = 0;
  std::vector<json> epochs, test;
  std::vector<int64_t> steps;
  std::string err;
  // The job is stopped twice, and resumed.
  for (const bool is_last : {false, false, true}) {
    ReplacedRun run = Saving({"--save=" + weights});
    kills += KillInSaves(run, 3);
    // The launcher replaces no rank of a job that it was told to stop.
    run.WaitForSteps(run.Events("step").size() + 5);
    if (!is_last) run.Stop();
    const Ended ended = run.Wait();
    absl::StrAppend(&err, ended.err);
    for (const json& epoch : run.Events("epoch")) epochs.push_back(epoch);
    for (const int64_t step : run.Steps()) steps.push_back(step);
    for (const json& event : run.Events("test")) test.push_back(event);
    EXPECT_FALSE(IsSaving(folder_));
    if (ended.code == 0) break;
    ASSERT_EQ(ended.code, 128 + SIGTERM) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr("the same command continues from there"));
  }
  SCOPED_TRACE(err);
  EXPECT_GE(kills, 3);
  EXPECT_THAT(err, HasSubstr("lost and replaced"));
  EXPECT_EQ(epochs, undisturbed.Events("epoch"));
  EXPECT_EQ(steps, undisturbed.Steps());
  ASSERT_EQ(test.size(), 1);
  EXPECT_EQ(test[0].at("state_hash"), undisturbed.Events("test")[0].at("state_hash"));
  EXPECT_EQ(test[0].at("loss"), undisturbed.Events("test")[0].at("loss"));
  EXPECT_TRUE(ReadText(weights) == ReadText(whole_weights));
  EXPECT_EQ(NamesIn(folder_).size(), 2) << testing::PrintToString(NamesIn(folder_));
  EXPECT_THAT(ProcessesWith("replaced"), testing::IsEmpty());
}

// The run has done all its steps, and still has to publish.
TEST_P(ReplaceSaveTest, ALossInTheLastSave) {
  ReplacedRun undisturbed(flags_);
  ASSERT_EQ(undisturbed.Wait().code, 0);
  for (const int rank : {0, 0, 2}) {
    SCOPED_TRACE(rank);
    fs::remove_all(folder_);
    ReplacedRun run = Saving({"--checkpoint_every=0"});
    EXPECT_TRUE(run.WaitForSteps(1));
    const pid_t pid = run.PidOf(rank);
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (!IsSaving(folder_) && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 60000)));
    const bool is_hit = IsSaving(folder_) && kill(pid, SIGKILL) == 0;
    const Ended ended = run.Wait();
    SCOPED_TRACE(ended.err);
    EXPECT_EQ(ended.code, 0);
    EXPECT_EQ(absl::StrContains(ended.err, "lost and replaced"), is_hit);
    ASSERT_EQ(run.Events("test").size(), 1);
    EXPECT_EQ(run.Events("test")[0].at("state_hash"),
              undisturbed.Events("test")[0].at("state_hash"));
    EXPECT_EQ(NamesIn(folder_).size(), 1) << testing::PrintToString(NamesIn(folder_));
    // It loads.
    const Ended again = Saving({"--checkpoint_every=0"}).Wait();
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_THAT(again.out, HasSubstr("resumed from " + folder_ + "/" + NamesIn(folder_)[0]));
  }
}

// It holds the folder, and an attempt that another rank 0 has to put away.
TEST_P(ReplaceSaveTest, ARankZeroThatFallsSilentInASave) {
  ReplacedRun undisturbed(flags_);
  ASSERT_EQ(undisturbed.Wait().code, 0);
  ReplacedRun run = Saving();
  ASSERT_TRUE(run.WaitForSteps(1));
  const pid_t rank0 = run.PidOf(0);
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!IsSaving(folder_) && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 60000)));
  ASSERT_EQ(kill(rank0, SIGSTOP), 0);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.err, HasSubstr("rank 0 is lost and replaced"));
  EXPECT_EQ(run.Events("test").at(0).at("state_hash"),
            undisturbed.Events("test")[0].at("state_hash"));
  EXPECT_EQ(run.Steps(), undisturbed.Steps());
  EXPECT_EQ(NamesIn(folder_).size(), 2) << testing::PrintToString(NamesIn(folder_));
}

TEST_P(ReplaceSaveTest, TheBestWeightsAreThoseOfAWholeRun) {
  const std::string whole_weights = TempPath("whole_best.safetensors"),
                    weights = TempPath("best.safetensors");
  const Flags flags = flags_ + Flags{"--eval_every=9", "--save_best", "--patience=100"};
  ReplacedRun undisturbed(flags + Flags{"--save=" + whole_weights});
  ASSERT_EQ(undisturbed.Wait().code, 0);
  ReplacedRun run(flags + Flags{"--save=" + weights});
  for (size_t steps = 5; run.WaitForSteps(steps);
       steps = run.Events("step").size() + 1 + random_() % 25)
    run.Kill(random_() % 2 == 0 ? 0 : static_cast<int>(random_() % kRanks));
  const Ended ended = run.Wait();
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(run.Events("test")[0].at("state_hash"), undisturbed.Events("test")[0].at("state_hash"));
  EXPECT_TRUE(ReadText(weights) == ReadText(whole_weights)) << ended.err;
  EXPECT_EQ(run.Events("evaluation"), undisturbed.Events("evaluation"));
  EXPECT_EQ(run.Steps(), undisturbed.Steps());
}

// Rank 0 is lost last: the one in its place has the record of all that happened before.
TEST_P(ReplaceSaveTest, TheReportShowsAllLosses) {
  const std::string report = TempPath("report.html"), trace = TempPath("trace.json");
  ReplacedRun run(flags_ + Flags{"--report=" + report, "--trace=" + trace});
  for (const int rank : {2, 0, 3, 0}) {
    ASSERT_TRUE(run.WaitForSteps(run.Events("step").size() + 5));
    ASSERT_TRUE(run.Kill(rank));
  }
  const Ended ended = run.Wait();
  EXPECT_EQ(ended.code, 0) << ended.err;
  const std::vector<json> lost = run.Events("lost");
  ASSERT_EQ(lost.size(), 4) << ended.err;
  const std::string page = ReadText(report);
  for (size_t i = 0; i < lost.size(); ++i) {
    EXPECT_EQ(lost[i].at("rank"), std::vector<int>({2, 0, 3, 0})[i]);
    EXPECT_GT(lost[i].at("pause_ms"), 0);
    EXPECT_THAT(lost[i].at("cause").get<std::string>(), HasSubstr("of 4 is lost: it was killed"));
    EXPECT_THAT(ended.out, HasSubstr(absl::StrCat("rank ", lost[i].at("rank").get<int>(),
                                                  " was lost and replaced; the other ranks "
                                                  "continued after step ",
                                                  lost[i].at("step").get<int64_t>())));
    EXPECT_THAT(page, HasSubstr(absl::StrCat("rank ", lost[i].at("rank").get<int>(),
                                             ", and replaced; the other ranks continue")));
  }
  const json spans = json::parse(ReadText(trace), nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(spans.is_discarded());
  EXPECT_THAT(page, HasSubstr(R"("ending":"")"));
}

// No rank is left that has the state.
TEST_P(ReplaceSaveTest, AJobThatLosesAllRanksRestartsFromItsCheckpoint) {
  ReplacedRun undisturbed(flags_);
  ASSERT_EQ(undisturbed.Wait().code, 0);
  ReplacedRun run(flags_ + Flags{"--checkpoint_dir=" + folder_, "--checkpoint_every=7"},
                  /*options=*/{},
                  {"tools/launch", absl::StrCat("--nproc=", kRanks), "--on_failure=replace",
                   "--max_restarts=1", "--"});
  ASSERT_TRUE(run.WaitForSteps(3) && run.Kill(0));
  ASSERT_TRUE(run.WaitForSteps(20));
  for (int rank = 0; rank < kRanks; ++rank) run.Kill(rank);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.err, HasSubstr("no rank of the group was left"));
  EXPECT_THAT(ended.out, HasSubstr("resumed from " + folder_));
  ASSERT_EQ(run.Events("test").size(), 1);
  EXPECT_EQ(run.Events("test")[0].at("state_hash"), undisturbed.Events("test")[0].at("state_hash"));
}

// A flush takes longer than the pause.
TEST(SlowSaveTest, NoRankWaitsForASaveThatIsAbandoned) {
  constexpr int kFlushMs = 4000;
  const std::string folder = TempPath("slow");
  ReplacedRun run({"--model=mlp", "--data=" + WriteSmallData("data", kData),
                   "--checkpoint_dir=" + folder, "--checkpoint_every=9"},
                  {.environment = {{"LD_PRELOAD", "tests/training/slow_disk.so"},
                                   {"SLOW_DISK_MS", absl::StrCat(kFlushMs)}}});
  ASSERT_TRUE(run.WaitForSteps(9));
  ASSERT_TRUE(run.Kill(2));
  run.AwaitLines("\"event\":\"lost\"", 1);
  ASSERT_EQ(run.Events("lost").size(), 1);
  EXPECT_EQ(run.Events("lost")[0].at("replaced"), true);
  EXPECT_LT(run.Events("lost")[0].at("pause_ms"), kFlushMs);
  EXPECT_TRUE(IsSaving(folder));
}

class SaveBestTest : public testing::TestWithParam<std::string> {};

// The evaluation of the only epoch is reported, and its weights are being written: they are the
// best, and no other file has them.
TEST_P(SaveBestTest, TheBestWeightsAreNotLostWithRankZero) {
  const std::string data = WriteSmallData("data", kData), best = TempPath("best.safetensors");
  fs::remove(best);
  ReplacedRun run(
      {"--model=mlp", "--data=" + data, "--epochs=1", "--save_best", "--save=" + best,
       "--on_failure=" + GetParam()},
      {.environment = {{"LD_PRELOAD", "tests/training/slow_disk.so"}, {"SLOW_DISK_MS", "1000"}}});
  ASSERT_TRUE(run.WaitForSteps(1));
  const pid_t rank0 = run.PidOf(0);
  run.AwaitLines("\"event\":\"epoch\"", 1);
  EXPECT_FALSE(fs::exists(best));
  EXPECT_EQ(kill(rank0, SIGKILL), 0);
  const Ended ended = run.Wait();
  EXPECT_EQ(ended.code, 0) << ended.err;
  ASSERT_TRUE(fs::exists(best)) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("saved " + best));
}

INSTANTIATE_TEST_SUITE_P(OnFailure, SaveBestTest, testing::Values("continue", "replace"));

INSTANTIATE_TEST_SUITE_P(Models, ReplaceSaveTest, testing::Values("mlp", "cnn"));

}  // namespace
}  // namespace evenkeel
