// A run that is killed again and again, at moments of chance, and each time goes on from its newest
// checkpoint: it ends with the weights of a run that nobody disturbed, bit for bit.
//
// Victims: one rank, the process that starts them, or all of them at once. Moments: some time after
// the start, or while a checkpoint is being written in the background; in the second test only
// those, on a disk that is slow enough for every stage of a save to be hit (slow_disk.cc). Rounds,
// each a run of its own, follow each other in three threads until so many kills have hit a running
// job; seeds decide everything except the moments. KILLS_IN_SAVES sets the number of the second
// test.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
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
Flags Common(int epochs) {
  static const std::string data = WriteSmallData("data", {.train = 600, .test = 20});
  return {"--model=mlp",    "--hidden=8",    "--nproc=3", absl::StrCat("--epochs=", epochs),
          "--batch_size=7", "--data=" + data};
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
  Killer(uint64_t seed, bool only_in_saves) : only_in_saves_(only_in_saves), random_(seed) {}

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
      absl::SleepFor(absl::Milliseconds(1));  // A look opens files.
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
  std::mt19937_64 random_;
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

// Returns the weights of a run of each variant that no kill disturbs.
std::vector<std::string> Undisturbed(int epochs) {
  std::vector<std::string> weights;
  for (const Variant& variant : kVariants) {
    const std::string path = TempPath("undisturbed.safetensors");
    const Ended whole = Train(With(With(Common(epochs), variant.flags), {"--save=" + path}));
    EXPECT_EQ(whole.code, 0) << whole.err;
    weights.push_back(ReadText(path));
    fs::remove(path);
  }
  return weights;
}

// Runs rounds of kills on the given disk and compares each with an undisturbed run.
class Rounds {
 public:
  Rounds(std::string name, int epochs, int least_kills, bool only_in_saves, ProgramOptions disk)
      : name_(std::move(name)),
        epochs_(epochs),
        least_kills_(least_kills),
        only_in_saves_(only_in_saves),
        disk_(std::move(disk)),
        undisturbed_(Undisturbed(epochs)) {}

  // Runs rounds until so many kills have hit a running job.
  void Run() {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([this, thread] {
        Killer killer(kSeed + thread, only_in_saves_);
        for (bool is_good = true; is_good && kills_ < least_kills_;) {
          is_good = false;
          RunOne(rounds_++, killer, is_good);
        }
        in_saves_ += killer.in_saves();
      });
    }
    for (std::thread& thread : threads) thread.join();
    testing::Test::RecordProperty("rounds", rounds_.load());
    testing::Test::RecordProperty("kills", kills_.load());
    testing::Test::RecordProperty("in_saves", in_saves_.load());
  }

  int in_saves() const { return in_saves_; }

 private:
  static constexpr int kThreads = 3;

  // Sets `is_good` if the round completes; a failed ASSERT returns early.
  void RunOne(int round, Killer& killer, bool& is_good) {
    const size_t kind = round % std::size(kVariants);
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", round ", round, ": ", kVariants[kind].name));
    // The suffix keeps "kill1" from being a prefix of the folder "kill10".
    const std::string folder = TempPath(absl::StrCat(name_, round, "_checkpoints")),
                      weights = folder + ".safetensors";
    const Flags flags =
        With(With(Common(epochs_), kVariants[kind].flags),
             {"--save=" + weights, "--checkpoint_dir=" + folder, "--checkpoint_every=3"});
    for (bool has_ended = false; !has_ended;) {
      Program program(With({kTrain}, flags), disk_);
      const bool was_killed = kills_ < least_kills_ && killer.Kill(program, folder);
      const Ended ended = program.Wait();
      ASSERT_FALSE(ended.timed_out) << ended.out << ended.err;
      ASSERT_TRUE(AllEnd(folder));
      has_ended = ended.code == 0;
      // Nothing but a kill ends it.
      ASSERT_TRUE(has_ended || was_killed) << ended.out << ended.err;
      kills_ += was_killed && !has_ended;
    }
    EXPECT_TRUE(ReadText(weights) == undisturbed_[kind]);
    EXPECT_FALSE(IsSaving(folder));
    is_good = true;
  }

  const std::string name_;
  const int epochs_, least_kills_;
  const bool only_in_saves_;
  const ProgramOptions disk_;
  const std::vector<std::string> undisturbed_;
  std::atomic<int> kills_ = 0, rounds_ = 0, in_saves_ = 0;
};

TEST(KillTest, AHundredKillsChangeNothing) {
  Rounds rounds("kill", /*epochs=*/8, 100, /*only_in_saves=*/false, {});
  rounds.Run();
  EXPECT_GE(rounds.in_saves(), 20);
}

TEST(KillTest, KillsInSavesChangeNothing) {
  const char* const number = std::getenv("KILLS_IN_SAVES");
  Rounds rounds(
      "in_save", /*epochs=*/3, number == nullptr ? 4 : std::atoi(number), /*only_in_saves=*/true,
      {.environment = {{"LD_PRELOAD", "tests/training/slow_disk.so"}, {"SLOW_DISK_MS", "4"}}});
  rounds.Run();
}

}  // namespace
}  // namespace evenkeel
