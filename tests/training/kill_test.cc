// A run that is killed again and again, at moments of chance, and each time goes on from its newest
// checkpoint: it ends with the weights of a run that nobody disturbed, bit for bit.
//
// Victims: one rank, the process that starts them, or all of them at once. Moments: some time after
// the start, or while a checkpoint is being written in the background; in the second test only
// those, on a disk that is slow enough for every stage of a save to be hit (slow_disk.cc). Rounds
// follow each other, each a run of its own, until so many kills have hit a running job; a seed
// decides everything except the moments. KILLS_IN_SAVES sets the number of the second test.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kSeed = 20240611;

using Flags = std::vector<std::string>;

Flags With(Flags flags, const Flags& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// 600 samples on 3 ranks in batches of 7: a rank becomes exhausted before each epoch's end.
const Flags& Common() {
  static const Flags flags = {
      "--model=mlp",    "--hidden=8",
      "--nproc=3",      "--epochs=8",
      "--batch_size=7", "--data=" + WriteSmallData("data", {.train = 600, .test = 20})};
  return flags;
}

struct Variant {
  const char* name;
  Flags flags;
};
const Variant kVariants[] = {
    {"slices", {"--backend=tcp"}},
    {"tensors", {"--backend=tcp", "--shards=tensors"}},
    {"whole", {"--backend=shm", "--nozero", "--optimizer=sgd", "--momentum=0.9"}},
};

bool IsSaving(const std::string& folder) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    if (absl::StartsWith(at->path().filename().string(), ".saving-")) return true;
  }
  return false;
}

class Killer {
 public:
  explicit Killer(bool only_in_saves) : only_in_saves_(only_in_saves) {}

  // One kill, at most; whether it hit a job that was running.
  bool Kill(Program& program, const std::string& folder) {
    const bool in_save = only_in_saves_ || random_() % 2 == 0;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    const absl::Time moment =
        absl::Now() + absl::Microseconds(static_cast<int64_t>(random_() % 600000));
    const int saves_to_wait_for = static_cast<int>(random_() % 6);
    int saves = 0;
    for (bool was_saving = false; absl::Now() < deadline && ProcessIsThere(program);) {
      const bool is_saving = IsSaving(folder);
      saves += is_saving && !was_saving;
      was_saving = is_saving;
      if (in_save && is_saving && saves > saves_to_wait_for) {
        const std::vector<pid_t> pids = ProcessesWith(folder);
        if (only_in_saves_)  // Any stage of it.
          absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 40000)));
        if (!only_in_saves_ || IsSaving(folder)) return Hit(program, folder, pids);
      }
      if (!in_save && absl::Now() >= moment) return Hit(program, folder, ProcessesWith(folder));
      absl::SleepFor(absl::Microseconds(200));
    }
    return false;
  }

  int in_saves() const { return in_saves_; }

 private:
  static bool ProcessIsThere(const Program& program) {
    // It has not been waited for: when it has ended its command line is empty.
    return !ReadText(absl::StrCat("/proc/", program.pid(), "/cmdline")).empty();
  }

  bool Hit(const Program& program, const std::string& folder, std::vector<pid_t> pids) {
    if (pids.empty()) return false;
    std::ranges::sort(pids);
    in_saves_ += IsSaving(folder);
    bool hit = false;
    switch (random_() % 4) {
      case 0:  // All at once.
        for (const pid_t pid : pids) hit |= kill(pid, SIGKILL) == 0;
        return hit;
      case 1:
        return kill(program.pid(), SIGKILL) == 0;
      default:
        return kill(pids[random_() % pids.size()], SIGKILL) == 0;
    }
  }

  const bool only_in_saves_;
  std::mt19937_64 random_{kSeed};
  int in_saves_ = 0;
};

// Ranks whose starter was killed are killed by the kernel, which takes a moment.
bool AllEnd(const std::string& folder) {
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (!ProcessesWith(folder).empty()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

// Kills runs on such a disk until so many kills have hit one; compares each with an undisturbed
// run.
void ExpectKillsChangeNothing(const std::string& name, int least_kills, Killer& killer,
                              const ProgramOptions& disk) {
  int kills = 0, rounds = 0;
  for (; kills < least_kills; ++rounds) {
    const Variant& variant = kVariants[rounds % std::size(kVariants)];
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", round ", rounds, ": ", variant.name));
    const std::string folder = TempPath(absl::StrCat(name, rounds)),
                      weights = folder + ".safetensors";
    const Flags flags = With(Common(), variant.flags);
    const Ended whole = Train(With(flags, {"--save=" + weights}));
    ASSERT_EQ(whole.code, 0) << whole.err;
    const std::string expected = ReadText(weights);
    fs::remove(weights);

    const Flags resumable =
        With(flags, {"--save=" + weights, "--checkpoint_dir=" + folder, "--checkpoint_every=3"});
    for (bool has_ended = false; !has_ended;) {
      Program program(With({kTrain}, resumable), disk);
      const bool was_killed = kills < least_kills && killer.Kill(program, folder);
      const Ended ended = program.Wait();
      ASSERT_FALSE(ended.timed_out) << ended.out << ended.err;
      ASSERT_TRUE(AllEnd(folder));
      has_ended = ended.code == 0;
      // Nothing but a kill ends it.
      ASSERT_TRUE(has_ended || was_killed) << ended.out << ended.err;
      kills += was_killed && !has_ended;
    }
    EXPECT_TRUE(ReadText(weights) == expected);
    EXPECT_FALSE(IsSaving(folder));
  }
  testing::Test::RecordProperty("rounds", rounds);
  testing::Test::RecordProperty("kills", kills);
  testing::Test::RecordProperty("in_saves", killer.in_saves());
}

TEST(KillTest, AHundredKillsChangeNothing) {
  Killer killer(/*only_in_saves=*/false);
  ExpectKillsChangeNothing("kill", 100, killer, {});
  EXPECT_GE(killer.in_saves(), 20);
}

TEST(KillTest, KillsInSavesChangeNothing) {
  const char* const number = std::getenv("KILLS_IN_SAVES");
  Killer killer(/*only_in_saves=*/true);
  ExpectKillsChangeNothing(
      "in_save", number == nullptr ? 4 : std::atoi(number), killer,
      {.environment = {{"LD_PRELOAD", "tests/training/slow_disk.so"}, {"SLOW_DISK_MS", "4"}}});
}

}  // namespace
}  // namespace evenkeel
