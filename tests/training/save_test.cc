// Checkpoints that are written in the background: saves on a slow disk, on a full one, of weights
// that are not finite, with a lost rank and at the end of the run; damaged checkpoints and jobs
// that are restarted.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
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

namespace fs = std::filesystem;

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using Json = nlohmann::json;
using Flags = std::vector<std::string>;

constexpr char kSlowDisk[] = "tests/training/slow_disk.so";

std::string Fresh(const std::string& name) {
  const std::string path = TempPath(name);
  fs::remove_all(path);
  return path;
}

Flags operator+(Flags flags, const Flags& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// The names in a folder of checkpoints.
std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  std::erase(names, ".lock");
  return names;
}

bool IsSaving(const std::string& folder) {
  return std::ranges::any_of(
      NamesIn(folder), [](const std::string& name) { return absl::StartsWith(name, ".saving-"); });
}

bool WaitUntil(const std::function<bool()>& is_true) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!is_true()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

// A run in a folder of its own, on a disk of slow_disk.cc.
class SaveTest : public testing::Test {
 protected:
  SaveTest()
      : folder_(Fresh(absl::StrCat("checkpoints", number_))),
        metrics_(Fresh(absl::StrCat("metrics", number_, ".jsonl"))),
        full_(Fresh(absl::StrCat("full", number_))) {
    ++number_;
  }

  // Forgets the run before.
  void Clear() const {
    for (const std::string& path : {folder_, metrics_, full_}) fs::remove_all(path);
  }

  Flags RunOf(int ranks) const {
    return {"--model=mlp",
            "--hidden=8",
            BackendFlagOfProcesses(),
            absl::StrCat("--nproc=", ranks),
            "--batch_size=4",
            "--epochs=1000000",
            "--data=" + WriteSmallData("data", {.train = 240, .test = 10}),
            "--metrics=" + metrics_,
            "--checkpoint_dir=" + folder_};
  }

  ProgramOptions Disk(int flush_ms = 0) const {
    return {.environment = {{"LD_PRELOAD", kSlowDisk},
                            {"SLOW_DISK_MS", absl::StrCat(flush_ms)},
                            {"FULL_DISK", full_}}};
  }

  std::vector<Json> Events() const {
    std::vector<Json> events;
    for (const std::string& line : Lines(ReadText(metrics_))) {
      const Json event = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!event.is_discarded()) events.push_back(event);
    }
    return events;
  }

  std::vector<Json> Saves() const {
    std::vector<Json> saves = Events();
    std::erase_if(saves, [](const Json& event) { return event["event"] != "checkpoint"; });
    return saves;
  }

  // Waits for a save of that outcome after the first `seen`, and returns the number of saves then.
  size_t WaitForSave(bool is_complete, size_t seen = 0) const {
    EXPECT_TRUE(WaitUntil([&] {
      const std::vector<Json> saves = Saves();
      return std::any_of(saves.begin() + std::min(seen, saves.size()), saves.end(),
                         [&](const Json& save) { return save["complete"] == is_complete; });
    }));
    return Saves().size();
  }

  // Resumes the newest checkpoint, which must load.
  void ExpectTheNewestLoads(int ranks) const {
    const std::string newest = NamesIn(folder_).back();
    ASSERT_TRUE(absl::StartsWith(newest, "step-")) << newest;
    const Ended ended = Train(RunOf(ranks) + Flags{"--max_steps=1"});
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_THAT(ended.out, HasSubstr("resumed from " + folder_ + "/" + newest));
  }

  static int number_;
  const std::string folder_, metrics_, full_;
};

int SaveTest::number_ = 0;

// Steps between the start of a save and its end are steps for which it did not wait.
TEST_F(SaveTest, StepsGoOnWhileItIsWritten) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    Clear();
    Program program(Flags{kTrain} + RunOf(ranks) + Flags{"--checkpoint_every=20"}, Disk(50));
    WaitForSave(true);
    ASSERT_EQ(kill(program.pid(), SIGTERM), 0);
    const Ended ended = program.Wait();
    EXPECT_EQ(ended.code, 128 + SIGTERM) << ended.err;
    int beside = 0;
    for (const Json& event : Events()) {
      beside += event["event"] == "step" && event["step"] >= 20;
      if (event["event"] != "checkpoint") continue;
      EXPECT_EQ(event["step"], 20);
      EXPECT_LT(event["stall_ms"], 50);
      EXPECT_GT(event["written_ms"], 50);
      EXPECT_GT(event["copied_bytes"], 8 * 784 * 4 * 2 / 3);  // A third of Adam's state.
      break;
    }
    EXPECT_GE(beside, 5);
  }
}

// A save first waits for the one before it, which flushes about twelve files and folders.
TEST_F(SaveTest, TheStallHasTheWaitForTheSaveBefore) {
  constexpr int kFlushMs = 30;
  const Ended ended =
      Train(RunOf(1) + Flags{"--checkpoint_every=1", "--max_steps=3"}, Disk(kFlushMs));
  ASSERT_EQ(ended.code, 0) << ended.err;
  const std::vector<Json> saves = Saves();
  ASSERT_EQ(saves.size(), 3);
  for (size_t i = 1; i < saves.size(); ++i) {
    EXPECT_GE(saves[i]["stall_ms"].get<double>(), 4 * kFlushMs) << saves[i];
    EXPECT_GE(saves[i]["written_ms"].get<double>(), saves[i]["stall_ms"].get<double>());
  }
}

TEST_F(SaveTest, AFullDiskIsReportedAndTheRunGoesOn) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    Clear();
    Program program(Flags{kTrain} + RunOf(ranks) + Flags{"--checkpoint_every=5"}, Disk());
    WaitForSave(true);
    WriteText(full_, "");
    const size_t failed = WaitForSave(false);
    fs::remove(full_);
    WaitForSave(true, failed);
    ASSERT_EQ(kill(program.pid(), SIGTERM), 0);
    const Ended ended = program.Wait();
    SCOPED_TRACE(ended.err);
    EXPECT_EQ(ended.code, 128 + SIGTERM);
    const std::string line = Lines(ended.err).front();
    EXPECT_THAT(line, HasSubstr("train: the checkpoint of step "));
    EXPECT_THAT(line, HasSubstr(" failed: "));
    EXPECT_THAT(line, HasSubstr("No space left on device"));
    EXPECT_THAT(line, HasSubstr("; training continues; the newest complete checkpoint is step "));
    EXPECT_FALSE(IsSaving(folder_));
    ExpectTheNewestLoads(ranks);
  }
}

TEST_F(SaveTest, TheLastOneThatFailsIsAnErrorOfTheRun) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    WriteText(full_, "");
    const Ended ended =
        Train(RunOf(ranks) + Flags{"--checkpoint_every=2", "--max_steps=4"}, Disk());
    SCOPED_TRACE(ended.err);
    EXPECT_EQ(ended.code, 1);
    EXPECT_THAT(ended.out, HasSubstr("\ntest_accuracy="));  // The training is not lost.
    ASSERT_EQ(Lines(ended.err).size(), 2u);
    EXPECT_THAT(Lines(ended.err)[0], HasSubstr("train: the checkpoint of step 2 failed: "));
    EXPECT_THAT(Lines(ended.err)[0],
                HasSubstr("; training continues; there is no complete checkpoint"));
    EXPECT_THAT(Lines(ended.err)[1], HasSubstr("train: the checkpoint of step 4 failed: "));
    EXPECT_THAT(Lines(ended.err)[1], Not(HasSubstr("training continues")));
    EXPECT_THAT(NamesIn(folder_), IsEmpty());
  }
}

// The learning rate makes weights infinite in the first step, whose loss is finite.
TEST_F(SaveTest, WeightsThatAreNotFiniteAreNotPublished) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    const Flags flags =
        RunOf(ranks) + Flags{"--optimizer=sgd", "--lr=1e39", "--checkpoint_every=1"};
    for (const int steps : {1, 2}) {
      const Ended ended = Train(flags + Flags{absl::StrCat("--max_steps=", steps)});
      SCOPED_TRACE(ended.err);
      EXPECT_EQ(ended.code, 1);
      if (steps == 1) {
        EXPECT_THAT(ended.err, HasSubstr("train: the checkpoint of step 1 failed: "));
        EXPECT_THAT(ended.err, HasSubstr("parameter \"fc1.weight\" is not finite: its element "));
      } else {
        EXPECT_THAT(ended.err, HasSubstr("the loss is "));
      }
      EXPECT_THAT(NamesIn(folder_), IsEmpty());
    }
  }
}

TEST_F(SaveTest, OneThatIsPendingAtTheEndIsCompleted) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    Clear();
    const Ended ended = Train(RunOf(ranks) + Flags{"--max_steps=4"}, Disk(25));
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_THAT(NamesIn(folder_), ElementsAre("step-000000004"));
    ASSERT_FALSE(Saves().empty());
    EXPECT_GT(Saves().back()["written_ms"], 100);  // About twelve flushes.
    ExpectTheNewestLoads(ranks);
  }
}

struct Lost {
  int ranks;
  int rank;
};

class LostInSaveTest : public SaveTest, public testing::WithParamInterface<Lost> {};

// The save is discarded, older checkpoints stay, and the other ranks save again.
TEST_P(LostInSaveTest, TheOtherRanksContinueAndSave) {
  const auto [ranks, rank] = GetParam();
  Program program(Flags{kTrain} + RunOf(ranks) +
                      Flags{"--checkpoint_every=20", "--nozero", "--on_failure=continue"},
                  Disk(20));
  WaitForSave(true);
  const std::vector<std::string> before = NamesIn(folder_);
  const pid_t victim = PidOfRank(metrics_, rank);
  ASSERT_GT(victim, 0);
  ASSERT_TRUE(WaitUntil([&] { return IsSaving(folder_); }));
  ASSERT_EQ(kill(victim, SIGKILL), 0);
  ASSERT_TRUE(
      WaitUntil([&] { return absl::StrContains(ReadText(metrics_), "\"event\":\"lost\""); }));
  const size_t seen = Saves().size();
  WaitForSave(true, seen);
  WaitForSave(true, seen + 1);
  ASSERT_EQ(kill(program.pid(), SIGTERM), 0);
  const Ended ended = program.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_THAT(ended.err, HasSubstr(absl::StrCat("train: rank ", rank, " is lost")));
  EXPECT_THAT(ended.err, HasSubstr("train: stopped after step "));
  EXPECT_FALSE(IsSaving(folder_));
  EXPECT_GT(NamesIn(folder_).back(), before.back());
  ExpectTheNewestLoads(ranks - 1);
}

INSTANTIATE_TEST_SUITE_P(Ranks, LostInSaveTest, testing::Values(Lost{2, 0}, Lost{3, 0}, Lost{3, 2}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.rank, "Of", info.param.ranks);
                         });

// By tools:launch, as a job that is restarted.
class RestartTest : public SaveTest {
 protected:
  Flags Job(int ranks, int restarts, const Flags& more) const {
    Flags flags = RunOf(ranks) + Flags{"--model=cnn", "--widths=4,4,4", "--checkpoint_every=2"};
    std::erase(flags, "--hidden=8");
    return Flags{"tools/launch",
                 absl::StrCat("--nproc=", ranks),
                 absl::StrCat("--max_restarts=", restarts),
                 "--restart_pause_s=0",
                 "--",
                 kTrain} +
           flags + more;
  }

  static void Spoil(const std::string& path) {
    std::string bytes = ReadText(path);
    bytes[bytes.size() / 2] ^= 1;
    WriteText(path, bytes);
  }
};

TEST_F(RestartTest, ADamagedCheckpointIsPassedOver) {
  const std::string kept = Fresh("kept");
  for (const int ranks : {1, 2, 3}) {
    fs::remove_all(folder_), fs::remove_all(kept);
    const Ended begun = evenkeel::Run(Job(ranks, 0, {"--max_steps=6"}));
    ASSERT_EQ(begun.code, 0) << begun.err;
    fs::copy(folder_, kept, fs::copy_options::recursive);
    const std::string newest = "step-000000006";
    std::vector<std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(kept + "/" + newest)) {
      if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), kept + "/" + newest));
    }
    for (const std::string& file : files) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", file));
      // The widest range of files with two ranks; a file of each kind of check with the others.
      if (ranks != 2 && file != "state.json" && file != "optimizer/manifest.json") continue;
      fs::remove_all(folder_);
      fs::copy(kept, folder_, fs::copy_options::recursive);
      Spoil(folder_ + "/" + newest + "/" + file);
      const Ended ended = evenkeel::Run(Job(ranks, 1, {"--max_steps=7"}));
      SCOPED_TRACE(ended.err);
      EXPECT_EQ(ended.code, 0);
      // The first attempt fails, as without restarts.
      EXPECT_THAT(ended.err, HasSubstr("; remove or rename " + folder_ + "/" + newest));
      EXPECT_THAT(ended.err, HasSubstr("train: the checkpoint of step 6 is passed over ("));
      EXPECT_THAT(ended.err, HasSubstr("and was renamed to " + folder_ + "/damaged-" + newest));
      EXPECT_THAT(ended.out, HasSubstr("resumed from " + folder_ + "/step-000000004"));
      EXPECT_THAT(NamesIn(folder_), ElementsAre("damaged-step-000000006", "step-000000004",
                                                "step-000000006", "step-000000007"));
    }
  }
}

TEST_F(RestartTest, IfNoneLoadsTheJobEndsAndNoneIsTouched) {
  ASSERT_EQ(evenkeel::Run(Job(2, 0, {"--max_steps=4"})).code, 0);
  const std::vector<std::string> names = NamesIn(folder_);
  for (const std::string& name : names)
    Spoil(absl::StrCat(folder_, "/", name, "/model.safetensors"));
  const Ended ended = evenkeel::Run(Job(2, 2, {"--max_steps=6"}));
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("no checkpoint in " + folder_ + " can be loaded; the newest: "));
  EXPECT_THAT(ended.err, HasSubstr("model.safetensors"));
  EXPECT_EQ(NamesIn(folder_), names);
}

TEST_F(RestartTest, ANamedCheckpointIsNotPassedOver) {
  ASSERT_EQ(evenkeel::Run(Job(2, 0, {"--max_steps=4"})).code, 0);
  const std::string named = folder_ + "/step-000000004";
  Spoil(named + "/model.safetensors");
  const Ended ended = evenkeel::Run(Job(2, 1, {"--max_steps=6", "--resume=" + named}));
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("damaged or was replaced"));
  EXPECT_THAT(NamesIn(folder_), ElementsAre("step-000000002", "step-000000004"));
}

// A difference in the settings is no damage.
TEST_F(RestartTest, AnotherRunsCheckpointIsNotPassedOver) {
  ASSERT_EQ(evenkeel::Run(Job(2, 0, {"--max_steps=4"})).code, 0);
  const Ended ended = evenkeel::Run(Job(2, 1, {"--max_steps=6", "--seed=1"}));
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("the checkpoint belongs to a different run"));
  EXPECT_THAT(NamesIn(folder_), ElementsAre("step-000000002", "step-000000004"));
}

}  // namespace
}  // namespace evenkeel
