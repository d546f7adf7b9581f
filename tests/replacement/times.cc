// Measures the pause of a job whose ranks are lost and replaced: kills or stops random ranks of a
// job of four, one after the other, and prints medians and maxima.
//
//   bazel run -c opt //tests/replacement:times -- --backend=shm --losses=25
//   bazel run -c opt //tests/replacement:times -- --backend=tcp --losses=5 --stop
//   bazel run -c opt //tests/replacement:times -- --backend=shm --losses=5 --state_mib=1024
//
// "loss": of the signal; "main": when the newcomer's main() prints its first line; "ready": when it
// has made its model and optimizer; "full": when the first step at full size begins. The launcher
// starts the newcomers. The parameters are a third of the state, the rest is AdamW's.

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/replacement/replaced_job.h"
#include "gflags/gflags.h"

DEFINE_string(backend, "shm", "shm, tcp or hierarchical.");
DEFINE_int32(losses, 25, "The number of losses.");
DEFINE_bool(stop, false, "Stops ranks (SIGSTOP) instead of killing them.");
DEFINE_bool(verbose, false, "Prints the standard error of the job.");
DEFINE_int32(state_mib, 0, "The state of a rank; 0: a toy model.");

namespace evenkeel {
namespace {

class Times {
 public:
  // Returns whether all losses have been repaired.
  bool Measure() {
    ChildProcesses launcher;
    Variables variables = {{"EVENKEEL_TEST_BACKEND", FLAGS_backend}};
    if (FLAGS_state_mib > 0)
      variables["REPLACEMENT_SIZE"] = absl::StrCat(int64_t{FLAGS_state_mib} * 1024 * 1024 / 12);
    const absl::Status started =
        launcher.Start({"tools/launch", absl::StrCat("--nproc=", ReplacedJob::kRanks),
                        "--on_failure=replace", "--", ReplacementRank(), "100000000", "1000"},
                       variables);
    if (!started.ok()) return false;
    const absl::Time limit = absl::Now() + absl::Minutes(9);
    launcher.Listen(
        limit, [&](int, absl::string_view line) { OnLine(line); },
        [&] {
          MaybeLose();
          return static_cast<int>(full_.size()) == FLAGS_losses;
        });
    if (FLAGS_verbose || static_cast<int>(full_.size()) < FLAGS_losses)
      std::cerr << launcher.complaints(0);
    launcher.Signal(0, SIGTERM);
    return launcher.Listen(absl::Now() + absl::Seconds(30), [](int, absl::string_view) {}) &&
           static_cast<int>(full_.size()) == FLAGS_losses;
  }
  void Print() {
    std::printf(
        "%s, %d losses (%s), %d MiB of state: loss -> main %s, main -> ready %s, "
        "ready -> full %s, main -> full %s, loss -> full %s\n",
        FLAGS_backend.c_str(), FLAGS_losses, FLAGS_stop ? "stopped" : "killed", FLAGS_state_mib,
        TextOf(main_).c_str(), TextOf(ready_).c_str(), TextOf(move_).c_str(),
        TextOf(entry_).c_str(), TextOf(full_).c_str());
  }

 private:
  static std::string TextOf(std::vector<absl::Duration> times) {
    std::ranges::sort(times);
    return absl::StrCat(
        absl::FormatDuration(absl::Trunc(times[times.size() / 2], absl::Milliseconds(1))),
        " (at most ", absl::FormatDuration(absl::Trunc(times.back(), absl::Milliseconds(1))), ")");
  }

  void OnLine(absl::string_view line) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    const absl::Time now = absl::Now();
    if (words[0] == "process") {
      int process = 0;
      if (!absl::SimpleAtoi(words[1], &process)) return;
      if (victim_ >= 0) {
        processes_[victim_] = process;
        came_ = now;
      } else {
        processes_.push_back(process);
      }
    }
    if (words[0] == "ready") ready_at_ = now;
    if (words[0] == "entered") has_entered_ = true;
    if (FLAGS_verbose && words[0] != "step") std::cerr << now << " " << line << "\n";
    if (words[0] != "step") return;
    if (victim_ < 0 && trains_at_ == absl::InfiniteFuture()) trains_at_ = now;
    if (victim_ < 0 || !has_entered_) return;
    main_.push_back(came_ - lost_);
    ready_.push_back(ready_at_ - came_);
    move_.push_back(now - ready_at_);
    entry_.push_back(now - came_);
    full_.push_back(now - lost_);
    victim_ = -1;
    has_entered_ = false;
    trains_at_ = now;
  }
  // A place is lost only after its process has lived for a second: else the launcher pauses.
  void MaybeLose() {
    const bool is_complete = processes_.size() == ReplacedJob::kRanks;
    if (victim_ >= 0 || !is_complete || absl::Now() - trains_at_ < absl::Milliseconds(1200)) return;
    victim_ = static_cast<int>(random_() % processes_.size());
    lost_ = absl::Now();
    kill(processes_[victim_], FLAGS_stop ? SIGSTOP : SIGKILL);
  }

  std::mt19937 random_{1};
  std::vector<int> processes_;  // By order of their start, later by the process that they replace.
  int victim_ = -1;             // Its index; -1: all train.
  bool has_entered_ = false;
  absl::Time trains_at_ = absl::InfiniteFuture(), lost_, came_, ready_at_;
  std::vector<absl::Duration> main_, ready_, move_, entry_, full_;
};

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  evenkeel::Times times;
  if (!times.Measure()) {
    std::cerr << "not all losses were repaired\n";
    return 1;
  }
  times.Print();
}
