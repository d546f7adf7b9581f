// A run of the trainer with --on_failure=replace, whose ranks a test kills.
//
//   ReplacedRun run({"--model=mlp", "--data=" + data});
//   EXPECT_TRUE(run.WaitForSteps(5) && run.Kill(2));
//   EXPECT_EQ(run.Wait().code, 0);
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TESTS_TRAINING_REPLACED_RUN_H_
#define EVENKEEL_TESTS_TRAINING_REPLACED_RUN_H_

#include <signal.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {

class ReplacedRun {
 public:
  static constexpr int kRanks = 4;

  explicit ReplacedRun(const std::vector<std::string>& flags, const ProgramOptions& options = {},
                       const std::vector<std::string>& launcher = {})
      : mark_(TempPath(absl::StrCat("replaced", number_++, ".jsonl"))) {
    std::vector<std::string> command = launcher;
    for (const std::string& flag : std::vector<std::string>{
             kTrain, BackendFlagOfProcesses(), absl::StrCat("--nproc=", kRanks), "--nozero",
             "--batch_size=4", "--epochs=2", "--on_failure=replace", "--metrics=" + mark_}) {
      command.push_back(flag);
    }
    command.insert(command.end(), flags.begin(), flags.end());
    program_ = std::make_unique<Program>(command, options);
  }

  // Returns the events of a kind, without the times of day, of the last run through their steps.
  std::vector<nlohmann::json> Events(absl::string_view kind) const {
    std::vector<nlohmann::json> events;
    for (const std::string& line : Lines(ReadText(mark_))) {
      nlohmann::json event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (event.is_discarded() || event.at("event") != std::string(kind)) continue;
      event.erase("seconds");
      events.push_back(std::move(event));
    }
    return events;
  }
  // Returns the numbers of the steps, in the order of their lines.
  std::vector<int64_t> Steps() const {
    std::vector<int64_t> steps;
    for (const nlohmann::json& event : Events("step")) steps.push_back(event.at("step"));
    return steps;
  }
  // Returns whether that many steps have been reported before the run ends.
  bool WaitForSteps(size_t steps) const {
    for (const absl::Time end = absl::Now() + absl::Seconds(40); absl::Now() < end;) {
      if (Events("step").size() >= steps) return true;
      if (!Events("test").empty()) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }
  pid_t PidOf(int rank) const { return PidOfRank(mark_, rank); }
  bool Kill(int rank) const {
    const pid_t pid = PidOf(rank);
    return pid > 0 && kill(pid, SIGKILL) == 0;
  }
  // Waits for so many lines with a text, at most until the program has ended.
  void AwaitLines(const std::string& text, int count) const {
    for (const absl::Time end = absl::Now() + absl::Seconds(40); absl::Now() < end;) {
      const std::string contents = ReadText(mark_);
      int found = 0;
      for (size_t at = 0; (at = contents.find(text, at)) != std::string::npos; at += text.size())
        ++found;
      if (found >= count) return;
    }
  }
  // Asks the job to save and stop.
  void Stop() const { kill(program_->pid(), SIGTERM); }
  Ended Wait() { return program_->Wait(); }

 private:
  inline static int number_ = 0;
  const std::string mark_;
  std::unique_ptr<Program> program_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_TRAINING_REPLACED_RUN_H_
