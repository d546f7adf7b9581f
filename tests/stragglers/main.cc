// Counts how often a group finds its slow rank, and how often it accuses one without a cause.
//
//   bazel run //tests/stragglers -- --runs=200              # a slow rank in each run
//   bazel run //tests/stragglers -- --clean_steps=1000000 --worlds=2,4
//
// A run is a job of processes with one delay, drawn from --seed: the rank, its cause, 5 to 50 % of
// a step, the number of ranks, the backend. After 520 steps rank 0 judges the last 500. The ranks
// of a job without delay compute, also if they are more than the cores; it is judged after every 50
// steps.
//
// Prints a table, and exits with 1 if fewer ranks than --least_ranks, or fewer phases than
// --least_phases, were found, or a rank was accused without a cause.

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/stragglers/delayed_training.h"
#include "gflags/gflags.h"

DEFINE_int32(runs, 0, "Runs with a delay.");
DEFINE_int64(clean_steps, 0, "Steps without a delay, for each world size and backend.");
DEFINE_string(worlds, "2,4,8", "Numbers of ranks.");
DEFINE_string(backends, "shm,tcp,hierarchical", "Backends.");
DEFINE_uint64(seed, 1, "Of the runs.");
DEFINE_double(least_ranks, 0.99, "Fraction of the runs whose rank must be found.");
DEFINE_double(least_phases, 0.95, "Fraction of the runs with a known phase in which it must be.");
DEFINE_bool(verbose, false, "Prints each run.");
// For a rank, which this program starts.
DEFINE_string(backend, "", "For ranks.");
DEFINE_int32(delay, -1, "For ranks: a Delay; clean steps if it is kNone.");
DEFINE_int32(slow_rank, 0, "For ranks.");
DEFINE_double(fraction, 0, "For ranks.");
DEFINE_int64(steps, 520, "For ranks.");
DEFINE_bool(neighbour, false, "Takes processor time until it is killed.");

namespace evenkeel {
namespace {

constexpr char kSecret[] = "of the ranks of tests/stragglers";
constexpr int64_t kWindow = 50;

struct Trial {
  int world_size = 2;
  std::string backend;
  Delay delay = Delay::kNone;
  int rank = 0;
  double fraction = 0;
  int64_t steps = 520;
};

struct Tally {
  int runs = 0, ranks = 0, phases = 0, known_phases = 0;
};

void PinTo(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof(cores), &cores);
}

// Prints, on rank 0: "<stragglers>|<phase of the first>|<accusations>".
absl::Status RunRank() {
  EndWithParent();
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = FLAGS_backend}));
  const auto delay = static_cast<Delay>(FLAGS_delay);
  const DelaySetting setting{.delay = delay,
                             .rank = FLAGS_slow_rank,
                             .fraction = FLAGS_fraction,
                             .step = absl::Milliseconds(delay == Delay::kNone ? 1 : 4),
                             .computes = delay == Delay::kNone || delay == Delay::kNeighbour};
  if (delay == Delay::kNeighbour) PinTo(comm->rank());
  EK_ASSIGN_OR_RETURN(const auto training, DelayedTraining::Create(comm.get(), setting));
  std::string accusations;
  const auto judge = [&](int64_t step) {
    const std::string news = StragglerNews(*comm);
    if (!news.empty()) absl::StrAppend(&accusations, "step ", step, ": ", news, ". ");
  };
  for (int64_t step = 0; step < FLAGS_steps; ++step) {
    EK_RETURN_IF_ERROR(training->Step());
    if (step % kWindow == 0) judge(step);
  }
  EK_RETURN_IF_ERROR(comm->Barrier());
  judge(FLAGS_steps);
  if (comm->rank() == 0) {
    const StragglerReport report = RecentStragglersOf(*comm);
    std::vector<int> found;
    for (size_t rank = 0; rank < report.ranks.size(); ++rank)
      if (report.ranks[rank].is_straggler) found.push_back(static_cast<int>(rank));
    std::cout << absl::StrJoin(found, ",") << "|"
              << (found.empty() ? 0 : static_cast<int>(report.ranks[found[0]].phase)) << "|"
              << accusations << std::endl;
    if (FLAGS_verbose) {
      for (const StragglerReport::Rank& rank : report.ranks)
        std::cerr << absl::StrFormat("%.3f ", rank.cost);
      std::cerr << report.Stragglers() << "\n";
    }
  }
  return comm->Finalize();
}

// Returns the line of rank 0.
absl::StatusOr<std::string> RunTrial(const Trial& trial) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<TcpStoreServer> server,
                      TcpStoreServer::Create({.secret = kSecret,
                                              .world_size = trial.world_size,
                                              .host = "the program of the trials"}));
  ChildProcesses ranks, neighbour;
  if (trial.delay == Delay::kNeighbour) {
    EK_RETURN_IF_ERROR(
        neighbour.Start({ThisProgram(), "--neighbour", absl::StrCat("--slow_rank=", trial.rank),
                         absl::StrCat("--fraction=", trial.fraction)},
                        {}));
  }
  for (int rank = 0; rank < trial.world_size; ++rank) {
    Variables variables = RankVariables(rank, trial.world_size, server->address(), kSecret);
    if (trial.backend == "hierarchical") variables["EVENKEEL_HOST_PARTS"] = "2";
    EK_RETURN_IF_ERROR(ranks.Start(
        {ThisProgram(), absl::StrCat("--backend=", trial.backend),
         absl::StrCat("--delay=", static_cast<int>(trial.delay)),
         absl::StrCat("--slow_rank=", trial.rank), absl::StrCat("--fraction=", trial.fraction),
         absl::StrCat("--steps=", trial.steps), absl::StrCat("--verbose=", FLAGS_verbose)},
        variables));
  }
  std::string said;
  const absl::Time deadline =
      absl::Now() + absl::Minutes(2) + trial.steps * trial.world_size * absl::Milliseconds(20);
  const bool has_ended =
      ranks.Listen(deadline, [&](int, absl::string_view line) { said = std::string(line); });
  std::string complaints;
  bool has_failed = !has_ended;
  for (int rank = 0; rank < trial.world_size; ++rank) {
    absl::StrAppend(&complaints, ranks.complaints(rank));
    has_failed = has_failed || ranks.is_running(rank) || ranks.exit_code(rank) != 0;
  }
  if (has_failed) return absl::InternalError(absl::StrCat("a rank failed: ", complaints));
  if (FLAGS_verbose) std::cerr << complaints;
  return said;
}

template <typename Value>
const Value& Draw(std::mt19937_64& random, const std::vector<Value>& values) {
  return values[random() % values.size()];
}

Trial DrawTrial(std::mt19937_64& random, const std::vector<int>& worlds,
                const std::vector<std::string>& backends) {
  Trial trial{.world_size = Draw(random, worlds),
              .backend = Draw(random, backends),
              .delay = static_cast<Delay>(1 + random() % (kDelays - 1))};
  // Computing ranks need a core each.
  const auto cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (trial.delay == Delay::kNeighbour) trial.world_size = std::min(trial.world_size, cores);
  trial.rank = static_cast<int>(random() % trial.world_size);
  trial.fraction = std::uniform_real_distribution(0.05, 0.5)(random);
  return trial;
}

std::string RowOf(const std::string& name, const Tally& tally) {
  return absl::StrFormat("| %-28s | %4d | %4d | %s |\n", name, tally.runs, tally.ranks,
                         tally.known_phases == 0
                             ? "-"
                             : absl::StrFormat("%d of %d", tally.phases, tally.known_phases));
}

absl::StatusOr<bool> RunDelays(const std::vector<int>& worlds,
                               const std::vector<std::string>& backends) {
  std::mt19937_64 random(FLAGS_seed);
  std::map<std::string, Tally> tallies;
  Tally all;
  for (int run = 0; run < FLAGS_runs; ++run) {
    const Trial trial = DrawTrial(random, worlds, backends);
    EK_ASSIGN_OR_RETURN(const std::string said, RunTrial(trial));
    const std::vector<std::string> parts = absl::StrSplit(said, '|');
    if (parts.size() != 3) return absl::InternalError("rank 0 said " + said);
    const bool is_rank = parts[0] == absl::StrCat(trial.rank);
    const std::optional<StepPhase> phase = PhaseOf(trial.delay);
    const bool is_phase =
        is_rank && phase.has_value() && parts[1] == absl::StrCat(static_cast<int>(*phase));
    for (Tally* tally :
         {&all, &tallies[NameOf(trial.delay)], &tallies[absl::StrCat(trial.world_size, " ranks")],
          &tallies[absl::StrCat("over ", trial.backend)]}) {
      ++tally->runs;
      tally->ranks += is_rank;
      tally->known_phases += phase.has_value();
      tally->phases += is_phase;
    }
    if (FLAGS_verbose || !is_rank || (phase.has_value() && !is_phase)) {
      std::cerr << absl::StrFormat(
          "run %d: %s of %.0f %% on rank %d of %d over %s: found \"%s\", phase %s\n", run,
          NameOf(trial.delay), 100 * trial.fraction, trial.rank, trial.world_size, trial.backend,
          parts[0], NameOf(static_cast<StepPhase>(atoi(parts[1].c_str()))));
    }
  }
  std::cout << "| runs with                    | runs | rank found | phase found |\n"
               "|---|---|---|---|\n";
  for (const auto& [name, tally] : tallies) std::cout << RowOf(name, tally);
  std::cout << RowOf("all", all);
  return all.ranks >= FLAGS_least_ranks * all.runs &&
         all.phases >= FLAGS_least_phases * all.known_phases;
}

absl::StatusOr<bool> RunClean(const std::vector<int>& worlds,
                              const std::vector<std::string>& backends) {
  bool is_clean = true;
  for (const int world_size : worlds) {
    for (const std::string& backend : backends) {
      EK_ASSIGN_OR_RETURN(
          const std::string said,
          RunTrial({.world_size = world_size, .backend = backend, .steps = FLAGS_clean_steps}));
      const std::vector<std::string> parts = absl::StrSplit(said, '|');
      if (parts.size() != 3) return absl::InternalError("rank 0 said " + said);
      std::cout << FLAGS_clean_steps << " steps without a delay, " << world_size << " ranks over "
                << backend << ": " << (parts[2].empty() ? "no accusation" : parts[2]) << std::endl;
      is_clean = is_clean && parts[2].empty();
    }
  }
  return is_clean;
}

// A nicer process gets less: 1024 / 820 of the weight of the next one.
void BeNeighbour() {
  EndWithParent();
  PinTo(FLAGS_slow_rank);
  // The rank is longer by the neighbour's weight over its own.
  int nice = 0;
  for (double weight = 1; weight > FLAGS_fraction && nice < 19; weight /= 1.25) ++nice;
  setpriority(PRIO_PROCESS, 0, nice);
  for (std::atomic<int64_t> turns = 0;;) turns.fetch_add(1, std::memory_order_relaxed);
}

int Main() {
  if (FLAGS_neighbour) BeNeighbour();
  if (FLAGS_delay >= 0) {
    const absl::Status status = RunRank();
    if (!status.ok()) std::cerr << status << "\n";
    return status.ok() ? 0 : 1;
  }
  std::vector<int> worlds;
  for (const absl::string_view text : absl::StrSplit(FLAGS_worlds, ',')) {
    if (!absl::SimpleAtoi(text, &worlds.emplace_back()) || worlds.back() < 1) {
      std::cerr << "stragglers: --worlds=" << FLAGS_worlds << " is no list of numbers\n";
      return 2;
    }
  }
  const std::vector<std::string> backends = absl::StrSplit(FLAGS_backends, ',');
  bool is_good = true;
  for (const auto& [wanted, run] :
       {std::pair(FLAGS_runs > 0, &RunDelays), std::pair(FLAGS_clean_steps > 0, &RunClean)}) {
    if (!wanted) continue;
    const absl::StatusOr<bool> good = run(worlds, backends);
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
