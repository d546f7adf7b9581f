// Counts how often a group finds its slow rank, and how often it accuses one without a cause.
//
//   bazel run //tests/stragglers -- --trials=200            # a slow rank in each job
//   bazel run //tests/stragglers -- --trial=17 --verbose    # one of them again
//   bazel run //tests/stragglers -- --clean_steps=100000    # no delay: no rank may be accused
//
// A trial is a job of processes with one delay, drawn from --seed: the rank, its cause, 5 to 50 %
// of a step (as measured before the delay begins), the number of ranks, the backend. Its last 500
// steps are judged; each job is asked for stragglers after every 25 steps. Ranks compute where
// their core is slow, and in clean steps if --clean_computes; else they sleep.
//
// Prints a table, and exits with 1 if fewer ranks than --least_ranks, or fewer phases than
// --least_phases, were found, if another rank was accused in more than the rest of the trials, or
// if any rank was accused in clean steps. A core is throttled by a control group, which needs root.

#include <unistd.h>

#include <cstdint>
#include <ctime>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/stragglers/delayed_training.h"
#include "evenkeel/tests/stragglers/slow_core.h"
#include "evenkeel/tests/stragglers/trial.h"
#include "gflags/gflags.h"

DEFINE_int32(trials, 0, "Jobs with a delay.");
DEFINE_int32(trial, -1, "Only this one of them.");
DEFINE_int64(clean_steps, 0, "Steps without a delay, for each world size and backend.");
DEFINE_int64(clean_step_us, 4000, "The computation in each of them.");
DEFINE_bool(clean_computes, true,
            "Their ranks compute, also if they are more than the cores; else they sleep.");
DEFINE_string(worlds, "2,4,8", "Numbers of ranks.");
DEFINE_string(backends, "shm,tcp,hierarchical", "Backends.");
DEFINE_uint64(seed, 1, "Of the trials.");
DEFINE_double(least_ranks, 0.99, "Fraction of the trials whose rank must be found.");
DEFINE_double(least_phases, 0.95, "Fraction of the trials with a known phase in which it must be.");
DEFINE_bool(verbose, false, "Prints each trial.");
// For a rank, which this program starts.
DEFINE_string(backend, "", "For ranks.");
DEFINE_int32(delay, -1, "For ranks: a Delay; clean steps if it is kNone.");
DEFINE_int32(slow_rank, 0, "For ranks.");
DEFINE_double(fraction, 0, "For ranks.");
DEFINE_int32(save_every, 1, "For ranks.");
DEFINE_int64(steps, 0, "For ranks.");
DEFINE_double(neighbour, 0, "Takes processor time, this fraction of another process's.");

namespace evenkeel {
namespace {

constexpr char kSecret[] = "of the ranks of tests/stragglers";
constexpr int64_t kBlock = 25;
constexpr int kHostParts = 2;  // For the hierarchical backend.
constexpr int kCalibration = 80;
constexpr absl::Duration kStep = absl::Milliseconds(20);
// A straggler is reported after 10 seconds at the earliest.
constexpr absl::Duration kLeastCleanTime = absl::Seconds(20);

int Cores() { return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); }

// Slows down the core of the slow rank, until destroyed.
struct SlowCore {
  std::unique_ptr<Throttle> throttle;
  ChildProcesses neighbour;
};

absl::Status SlowDown(DelayedTraining& training, bool is_slow, SlowCore& core) {
  const absl::Duration before = training.step_time();
  if (FLAGS_delay == static_cast<int>(Delay::kThrottled)) {
    if (is_slow) {  // It no longer waits for other ranks, which may take processor time, too.
      EK_ASSIGN_OR_RETURN(core.throttle, Throttle::Create());
      EK_RETURN_IF_ERROR(core.throttle->SetShare(0.5));
    }
    const std::clock_t used_before = std::clock();
    EK_RETURN_IF_ERROR(training.Calibrate(kCalibration));
    const absl::Duration used =
        absl::Seconds(1) * (std::clock() - used_before) / CLOCKS_PER_SEC / kCalibration;
    const double share = absl::FDivDuration(used, before * (1 + FLAGS_fraction));
    if (is_slow) EK_RETURN_IF_ERROR(core.throttle->SetShare(share));
  } else if (is_slow && FLAGS_delay == static_cast<int>(Delay::kNeighbour)) {
    const double fraction = FLAGS_fraction * absl::FDivDuration(before, kStep);
    EK_RETURN_IF_ERROR(
        core.neighbour.Start({ThisProgram(), absl::StrCat("--neighbour=", fraction)}, {}));
  }
  return absl::OkStatus();
}

// Prints the findings, on rank 0.
absl::Status RunRank() {
  EndWithParent();
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  const auto delay = static_cast<Delay>(FLAGS_delay);
  if (Computes(delay)) {
    PinTo(environment.rank);
  } else if (FLAGS_backend == "hierarchical") {
    // Hosts have no core in common: ranks that have a core each spin for a while when they wait.
    PinTo(environment.rank % kHostParts % Cores());
  }
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = FLAGS_backend}));
  const bool is_clean = delay == Delay::kNone;
  const DelaySetting setting{.delay = delay,
                             .rank = FLAGS_slow_rank,
                             .fraction = FLAGS_fraction,
                             .step = is_clean ? absl::Microseconds(FLAGS_clean_step_us) : kStep,
                             .computes = is_clean ? FLAGS_clean_computes : Computes(delay),
                             .save_every = FLAGS_save_every};
  EK_ASSIGN_OR_RETURN(const auto training, DelayedTraining::Create(comm.get(), setting));
  EK_RETURN_IF_ERROR(training->Calibrate(kCalibration));
  SlowCore core;
  EK_RETURN_IF_ERROR(SlowDown(*training, comm->rank() == FLAGS_slow_rank, core));

  Found found;
  std::string news;
  StragglerReport report;
  // On all ranks, so that it makes none of them slower.
  const auto ask = [&](int64_t step) {
    report = RecentStragglersOf(*comm);
    found.stragglers.clear();
    for (const StragglerReport::Rank& rank : report.ranks)
      if (rank.is_straggler) found.stragglers.insert(rank.rank);
    found.ever.insert(found.stragglers.begin(), found.stragglers.end());
    const std::string text = StragglerNews(*comm);
    if (!text.empty()) absl::StrAppend(&news, "  step ", step, ": ", text, "\n");
  };
  for (int64_t step = 0; step < FLAGS_steps; ++step) {
    EK_RETURN_IF_ERROR(training->Step());
    if (step % kBlock == 0) ask(step);
  }
  EK_RETURN_IF_ERROR(comm->Barrier());
  ask(FLAGS_steps);
  if (!found.stragglers.empty()) found.phase = report.ranks[*found.stragglers.begin()].phase;
  if (comm->rank() == 0) {
    std::cout << found.Text() << std::endl;
    std::cerr << news << report.Table();
  }
  return comm->Finalize();
}

struct Outcome {
  Found found;
  std::string log;  // Of rank 0.
};

absl::StatusOr<Outcome> RunJob(const Trial& trial) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<TcpStoreServer> server,
                      TcpStoreServer::Create({.secret = kSecret,
                                              .world_size = trial.world_size,
                                              .host = "the program of the trials"}));
  ChildProcesses ranks;
  for (int rank = 0; rank < trial.world_size; ++rank) {
    Variables variables = RankVariables(rank, trial.world_size, server->address(), kSecret);
    if (trial.backend == "hierarchical")
      variables["EVENKEEL_HOST_PARTS"] = absl::StrCat(kHostParts);
    EK_RETURN_IF_ERROR(ranks.Start(
        {ThisProgram(), absl::StrCat("--backend=", trial.backend),
         absl::StrCat("--delay=", static_cast<int>(trial.delay)),
         absl::StrCat("--slow_rank=", trial.rank), absl::StrCat("--fraction=", trial.fraction),
         absl::StrCat("--save_every=", trial.save_every), absl::StrCat("--steps=", trial.steps),
         absl::StrCat("--clean_step_us=", FLAGS_clean_step_us),
         absl::StrCat("--clean_computes=", FLAGS_clean_computes)},
        variables));
  }
  std::string said;
  const absl::Time deadline =
      absl::Now() + absl::Minutes(2) + trial.steps * trial.world_size * absl::Milliseconds(20);
  bool has_failed =
      !ranks.Listen(deadline, [&](int, absl::string_view line) { said = std::string(line); });
  std::string logs;
  for (int rank = 0; rank < trial.world_size; ++rank) {
    absl::StrAppend(&logs, ranks.complaints(rank));
    has_failed = has_failed || ranks.is_running(rank) || ranks.exit_code(rank) != 0;
  }
  if (has_failed) return absl::InternalError(absl::StrCat("a rank failed: ", logs));
  EK_ASSIGN_OR_RETURN(Found found, Found::Parse(said));
  return Outcome{std::move(found), std::move(logs)};
}

absl::StatusOr<bool> RunTrials(TrialRange range) {
  const bool can_throttle = Throttle::Create().ok();
  if (!can_throttle) std::cerr << "Without trials of a throttled core: it needs root, cgroup v1.\n";
  for (int delay = 1; delay < kDelays; ++delay)
    if (can_throttle || static_cast<Delay>(delay) != Delay::kThrottled)
      range.delays.push_back(static_cast<Delay>(delay));
  Scores scores;
  const bool is_one = FLAGS_trial >= 0;
  for (int i = is_one ? FLAGS_trial : 0; i < (is_one ? FLAGS_trial + 1 : FLAGS_trials); ++i) {
    const Trial trial = DrawTrial(range, i);
    EK_ASSIGN_OR_RETURN(const Outcome outcome, RunJob(trial));
    const Verdict verdict = Judge(trial, outcome.found);
    scores.Add(trial, verdict);
    const bool is_right = verdict.is_rank && verdict.is_phase.value_or(true) && !verdict.is_false;
    if (FLAGS_verbose || !is_right) {
      std::cerr << (is_right ? "right" : "WRONG") << ": trial " << i << ": " << trial.Description()
                << ": found " << outcome.found.Text() << "\n"
                << outcome.log;
    }
  }
  std::cout << scores.Table();
  const Scores::Score& all = scores.all();
  return all.ranks >= FLAGS_least_ranks * all.runs &&
         all.phases >= FLAGS_least_phases * all.known_phases &&
         all.false_accusations <= (1 - FLAGS_least_ranks) * all.runs;
}

absl::StatusOr<bool> RunClean(TrialRange range) {
  bool is_clean = true;
  for (const int world_size : range.worlds) {
    for (const std::string& backend : range.backends) {
      const Trial job{.world_size = world_size, .backend = backend, .steps = FLAGS_clean_steps};
      const absl::Time begin = absl::Now();
      EK_ASSIGN_OR_RETURN(const Outcome outcome, RunJob(job));
      const absl::Duration took = absl::Now() - begin;
      if (took < kLeastCleanTime) {
        return absl::InvalidArgumentError(
            absl::StrCat("--clean_steps=", job.steps, " took ", absl::FormatDuration(took),
                         ", too short to accuse a rank: at least ",
                         absl::FormatDuration(kLeastCleanTime), " are needed"));
      }
      const bool is_false = Judge(job, outcome.found).is_false;
      std::cout << absl::StrFormat(
                       "| %d ranks over %s | %d | %.2f ms | %s |", world_size, backend, job.steps,
                       absl::ToDoubleMilliseconds(took) / job.steps,
                       is_false ? "ranks accused: " + outcome.found.Text() : "no accusation")
                << std::endl;
      if (is_false || FLAGS_verbose) std::cerr << outcome.log;
      is_clean = is_clean && !is_false;
    }
  }
  return is_clean;
}

int Main() {
  if (FLAGS_neighbour > 0) {
    EndWithParent();
    BeBusyNeighbour(FLAGS_neighbour);
  }
  if (FLAGS_delay >= 0) {
    const absl::Status status = RunRank();
    if (!status.ok()) std::cerr << status << "\n";
    return status.ok() ? 0 : 1;
  }
  TrialRange range{.seed = FLAGS_seed,
                   .worlds = {},
                   .backends = absl::StrSplit(FLAGS_backends, ','),
                   .cores = Cores()};
  for (const absl::string_view text : absl::StrSplit(FLAGS_worlds, ',')) {
    if (!absl::SimpleAtoi(text, &range.worlds.emplace_back()) || range.worlds.back() < 1) {
      std::cerr << "stragglers: --worlds=" << FLAGS_worlds << " is no list of numbers\n";
      return 2;
    }
  }
  bool is_good = true;
  for (const auto& [wanted, run] : {std::pair(FLAGS_trials > 0 || FLAGS_trial >= 0, &RunTrials),
                                    std::pair(FLAGS_clean_steps > 0, &RunClean)}) {
    if (!wanted) continue;
    const absl::StatusOr<bool> good = run(range);
    if (!good.ok()) {
      std::cerr << "stragglers: " << good.status() << "\n";
      return 1;
    }
    is_good = is_good && *good;
  }
  return is_good ? 0 : 1;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  return evenkeel::Main();
}
