// Injects faults into trainings, and looks whether every rank ends with an error that names the
// guilty one, at once and without a wrong number; and whether what is no fault goes well.
//
//   bazel run //tests:faults -- --scenarios=500 --seed=7 bazel run //tests:faults -- --seed=7
//   --only=112 that one alone, with all that its ranks say bazel run //tests:faults --
//   --fault=killed --backend=shm only of that kind
//
// The exit code is 1 if anything was not as it should be.

#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "evenkeel/tests/faults/run_scenario.h"
#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/faults/verdict.h"
#include "gflags/gflags.h"

DEFINE_int32(scenarios, 60, "How many scenarios.");
DEFINE_uint64(seed, 1, "What they are drawn from.");
DEFINE_int32(only, -1, "Only the scenario of this number, with every rank's words.");
DEFINE_string(fault, "", "Only those of this fault (killed, stopped, other_size, ...).");
DEFINE_string(backend, "",
              "Only those over this backend: local, whose ranks are threads, or tcp, shm, "
              "hierarchical (of two hosts, as "
              "far as shared memory goes). Without it: local, and tcp.");
DEFINE_int32(shard, 0, "Of --shards, which to run.");
DEFINE_int32(shards, 1, "Into how many parts the scenarios are divided.");
DEFINE_int32(jobs, 2, "How many scenarios run at a time.");
DEFINE_double(hang_s, 20, "After so many seconds a scenario hangs, and is ended.");
DEFINE_bool(list, false, "Only say what would be run.");
DEFINE_string(role, "", "Internal: this process is a rank, or has all of them.");

namespace evenkeel {
namespace {

std::vector<Scenario> Chosen() {
  std::vector<Scenario> chosen;
  if (FLAGS_only >= 0) return {MakeScenario(FLAGS_seed, FLAGS_only)};
  for (int index = 0; index < FLAGS_scenarios; ++index) {
    if (index % FLAGS_shards != FLAGS_shard) continue;
    Scenario scenario = MakeScenario(FLAGS_seed, index);
    if (!FLAGS_fault.empty() && Name(scenario.fault) != FLAGS_fault) continue;
    if (!FLAGS_backend.empty() && scenario.as_processes != (FLAGS_backend != "local")) continue;
    chosen.push_back(std::move(scenario));
  }
  return chosen;
}

class Tally {
 public:
  void Add(const Scenario& scenario, const absl::StatusOr<Outcome>& outcome) {
    absl::MutexLock lock(&mutex_);
    ++scenarios_;
    const Verdict verdict = outcome.ok() ? Judge(scenario, *outcome) : NotRun(outcome.status());
    hangs_ += verdict.hangs;
    wrong_ += verdict.is_wrong;
    unnamed_ += verdict.is_unnamed;
    other_ += verdict.is_other;
    seconds_.insert(seconds_.end(), verdict.seconds.begin(), verdict.seconds.end());
    if (FLAGS_only >= 0 && outcome.ok()) Describe(scenario, *outcome);
    if (verdict.is_good()) return;
    ++failed_;
    std::cout << "FAILED --seed=" << scenario.seed << " --only=" << scenario.index << "  "
              << evenkeel::Describe(scenario) << "\n";
    for (const std::string& complaint : verdict.complaints)
      std::cout << "    " << complaint << "\n";
    if (outcome.ok() && FLAGS_only < 0) PrintComplaints(*outcome);
    std::cout << std::flush;
  }

  // Whether all went well.
  bool Print() {
    absl::MutexLock lock(&mutex_);
    std::sort(seconds_.begin(), seconds_.end());
    const double median = seconds_.empty() ? 0 : seconds_[seconds_.size() / 2];
    const double maximum = seconds_.empty() ? 0 : seconds_.back();
    std::cout << absl::StrFormat(
        "%d scenarios: %d failed (%d hang, %d wrong, %d do not name the guilty rank, %d "
        "otherwise); from the fault to "
        "the other ranks' report: median %.3f s, maximum %.3f s, of %d reports\n",
        scenarios_, failed_, hangs_, wrong_, unnamed_, other_, median, maximum, seconds_.size());
    return failed_ == 0;
  }

 private:
  static Verdict NotRun(const absl::Status& why) {
    return {.is_other = true,
            .complaints = {absl::StrCat("it could not be run: ", why.ToString())}};
  }

  static void PrintComplaints(const Outcome& outcome) {
    if (!outcome.complaints.empty()) std::cout << "    stderr: " << outcome.complaints << "\n";
  }

  static void Describe(const Scenario& scenario, const Outcome& outcome) {
    std::cout << evenkeel::Describe(scenario) << "\n";
    const int64_t fault = outcome.reports[scenario.victim].diverged;
    for (const RankReport& report : outcome.reports) {
      std::cout << absl::StrFormat("  rank %d: ", report.rank);
      if (report.ended == 0) {
        std::cout << "says nothing\n";
      } else {
        std::cout << absl::StrFormat("after %.3f s, %d steps: %s\n",
                                     fault == 0 ? 0 : (report.ended - fault) * 1e-9,
                                     report.result.steps, report.result.status.ToString());
      }
    }
    PrintComplaints(outcome);
  }

  absl::Mutex mutex_;
  int scenarios_ ABSL_GUARDED_BY(mutex_) = 0;
  int failed_ ABSL_GUARDED_BY(mutex_) = 0;
  int hangs_ ABSL_GUARDED_BY(mutex_) = 0;
  int wrong_ ABSL_GUARDED_BY(mutex_) = 0;
  int unnamed_ ABSL_GUARDED_BY(mutex_) = 0;
  int other_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<double> seconds_ ABSL_GUARDED_BY(mutex_);
};

// The next scenario for whoever asks.
class Queue {
 public:
  explicit Queue(const std::vector<Scenario>& scenarios) : scenarios_(scenarios) {}
  const Scenario* Next() {
    absl::MutexLock lock(&mutex_);
    return next_ < scenarios_.size() ? &scenarios_[next_++] : nullptr;
  }

 private:
  const std::vector<Scenario>& scenarios_;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
};

int RunAll() {
  const std::vector<Scenario> scenarios = Chosen();
  if (scenarios.empty()) {
    std::cerr << "faults: no scenario is of that kind\n";
    return 2;
  }
  if (FLAGS_list) {
    for (const Scenario& scenario : scenarios)
      std::cout << scenario.index << "  " << Describe(scenario) << "\n";
    return 0;
  }
  Tally tally;
  Queue queue(scenarios);
  std::vector<std::thread> workers;
  for (int job = 0; job < FLAGS_jobs; ++job) {
    workers.emplace_back([&] {
      while (const Scenario* scenario = queue.Next()) {
        tally.Add(*scenario, RunScenario(*scenario, absl::Seconds(FLAGS_hang_s)));
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return tally.Print() ? 0 : 1;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  gflags::SetUsageMessage("Injects faults into trainings, and looks how every rank ends.");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  if (FLAGS_shards < 1 || FLAGS_jobs < 1) {
    std::cerr << "faults: --shards and --jobs must be at least 1\n";
    return 2;
  }
  if (!FLAGS_role.empty()) {
    const absl::Status status =
        evenkeel::RunAsChild(evenkeel::MakeScenario(FLAGS_seed, FLAGS_only), FLAGS_role);
    if (!status.ok()) std::cerr << status << "\n";
    return status.ok() ? 0 : 1;
  }
  if (!FLAGS_backend.empty())
    setenv("EVENKEEL_TEST_BACKEND", FLAGS_backend.c_str(), /*overwrite=*/1);
  if (FLAGS_backend == "hierarchical") setenv("EVENKEEL_HOST_PARTS", "2", /*overwrite=*/1);
  signal(SIGPIPE, SIG_IGN);  // A rank that is told something may be dead.
  return evenkeel::RunAll();
}
