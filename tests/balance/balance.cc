// Measures the time that Balance saves, mostly with ranks whose computing is a sleep. See --help.
//
//   without a launcher       starts the ranks of each group
//   under a launcher         is one of its ranks and measures; rank 0 prints

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/balance/slept_training.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/stragglers/slow_core.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rank_job.h"
#include "evenkeel/tools/measure/rounds.h"
#include "evenkeel/tools/measure/table.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"

DEFINE_string(groups, "shm:2,shm:4,shm:8,tcp:4,hierarchical:4",
              "Backends, each with its number of ranks.");
DEFINE_string(rows, "", "Beginnings of the names of rows; empty: all.");
DEFINE_double(seconds, 5.5, "Duration of a row with Balance, of which the first 2 are to settle.");
DEFINE_double(even_seconds, 0.6, "Duration of a row with even shares, at least 20 steps.");
DEFINE_int32(pairs, 30, "Pairs of blocks for the cost, over shm:2; 0: it is not measured.");
DEFINE_int32(cost_steps, 300, "Steps of each of these blocks, of 2 ms.");
DEFINE_bool(verbose, false, "Prints each change of shares.");
DEFINE_string(group, "", "Set for the ranks that it starts.");
DEFINE_double(neighbour, 0, "Takes time of a core, this much per time of another process there.");

namespace evenkeel {
namespace {

constexpr char kUsage[] = R"(Training with shares by measured speed, against the best shares.

  bazel run //tests/balance                          the whole tables, 17 minutes on a quiet machine
  bazel run //tests/balance -- --groups=tcp:8 --rows="half speed,a quota" --pairs=0

even, balanced  the mean step with even shares, and with Balance after 50 steps and 2 s
best            T*: the mean step of the best division: the costs that are slept, or those of
                computing as measured on each rank, plus the time of the rest of a step, as
                measured with equal speeds
of N/T*         throughput with Balance as a fraction of that with the best division
settled         the first step whose shares allow 95 % of the best throughput, by the costs
changes         the number of changes of the shares after that
uneven          steps in which a share differs from the even one by more than a quantum)";

constexpr int kHostParts = 2;  // For the hierarchical backend.

// An even step takes 32 ms or more. The last rank is the slow one.
const Workload kRows[] = {
    {.name = "equal speeds"},
    {.name = "half speed", .last_speed = 0.5},
    {.name = "two speeds", .last_speed = 0.5, .first_speed = 0.75},
    {.name = "comes and goes", .last_speed = 0.5, .period_ms = 40'000},
    {.name = "fixed cost", .last_fixed_ms = 20},
    {.name = "second pass", .last_speed = 0.5, .second_pass_ms = 20},
    {.name = "slow input", .last_input_ms = 12},
    {.name = "input by sample", .last_input_sample_ms = 0.75},
    {.name = "saving", .last_saving_ms = 120},
    {.name = "not marked", .last_outside_ms = 60},
    {.name = "a quota", .last_quota = 0.5},
    {.name = "half speed, computed", .last_speed = 0.5, .computes = true},
    {.name = "busy neighbour", .computes = true, .last_neighbour = 1},
    {.name = "a core's quota", .computes = true, .last_throttle = 0.5},
};

// Ranks that compute, each on a core of its own. Slows down that of the last one, until destroyed.
class OwnCores {
 public:
  OwnCores() { sched_getaffinity(0, sizeof(before_), &before_); }
  ~OwnCores() { sched_setaffinity(0, sizeof(before_), &before_); }

  // Errors: of the last rank only.
  absl::Status Begin(const Workload& row, int rank, int world_size) {
    PinTo(rank);
    if (rank != world_size - 1) return absl::OkStatus();
    if (row.last_throttle > 0) {
      EK_ASSIGN_OR_RETURN(throttle_, Throttle::Create());
      EK_RETURN_IF_ERROR(throttle_->SetShare(row.last_throttle));
    }
    if (row.last_neighbour == 0) return absl::OkStatus();
    return neighbour_.Start({OwnPath(), absl::StrCat("--neighbour=", row.last_neighbour)}, {});
  }

 private:
  cpu_set_t before_;
  std::unique_ptr<Throttle> throttle_;
  ChildProcesses neighbour_;
};

bool IsChosen(const Workload& row, int world_size) {
  if (row.computes && world_size > sysconf(_SC_NPROCESSORS_ONLN)) return false;
  const std::vector<std::string> chosen = ListOf(FLAGS_rows);
  return chosen.empty() || std::ranges::any_of(chosen, [&](const std::string& name) {
           return absl::StartsWith(row.name, name);
         });
}

std::vector<std::string> CellsOf(const Workload& row, const Outcome& outcome) {
  const bool has_settled = outcome.settled_step >= 0;
  return {row.name,
          absl::StrCat(outcome.batch),
          absl::StrCat(outcome.quantum),
          absl::StrFormat("%.2f", outcome.even_ms),
          absl::StrFormat("%.2f", outcome.balanced_ms),
          absl::StrFormat("%.2f", outcome.best_ms),
          absl::StrFormat("%.1f %%", 100 * outcome.part_of_best),
          has_settled ? absl::StrFormat("%d, %.1f s", outcome.settled_step, outcome.settled_s)
                      : "never",
          absl::StrCat(outcome.changes_after),
          absl::StrFormat("%.1f %%", 100 * outcome.uneven_steps),
          absl::StrJoin(outcome.last_shares, ",")};
}

absl::Status MeasureRows(Communicator& comm, SleptTraining& training) {
  EK_ASSIGN_OR_RETURN(const double rest_ms, training.MeasureRest());
  const Table table({{"", -20},
                     {"batch", 5},
                     {"quantum", 7},
                     {"even ms", 8},
                     {"balanced", 8},
                     {"best", 8},
                     {"of N/T*", 8},
                     {"settled", 11},
                     {"changes", 7},
                     {"uneven", 7},
                     {"last shares", -11}});
  const bool prints = comm.rank() == 0;
  if (prints) {
    std::cout << absl::StrFormat("\n%s, %.2f ms of a step are not slept\n", FLAGS_group, rest_ms)
              << table.Titles() << std::flush;
  }
  TryOptions options = {
      .rest_ms = rest_ms, .even_s = FLAGS_even_seconds, .balanced_s = FLAGS_seconds};
  if (prints && FLAGS_verbose) {
    options.on_change = [](const ShareChange& change) {
      std::cout << change.reduction << ": " << absl::StrJoin(change.shares, ",") << std::endl;
      return absl::OkStatus();
    };
  }
  for (const Workload& row : kRows) {
    if (!IsChosen(row, comm.world_size())) continue;
    OwnCores cores;
    if (row.computes) {
      const absl::Status begun = cores.Begin(row, comm.rank(), comm.world_size());
      if (!begun.ok()) std::cout << row.name << ": left out: " << begun << std::endl;
      EK_ASSIGN_OR_RETURN(const Numbers failed, LargestOf(comm, {begun.ok() ? 0.0 : 1.0}));
      if (failed[0] > 0) continue;
    }
    EK_ASSIGN_OR_RETURN(const Outcome outcome, training.Try(row, options));
    if (prints) std::cout << table.Line(CellsOf(row, outcome)) << std::flush;
  }
  return absl::OkStatus();
}

// The blocks with Balance, or those without.
struct Side {
  std::vector<double> seconds;
  double messages = 0, bytes = 0, collectives = 0;  // That this rank has sent, in all.
};

absl::Status RunBlock(Communicator& comm, SleptTraining& training, Side& side, bool balances) {
  const Workload equal = {.sample_ms = 2.0 / 32};
  std::unique_ptr<Balance> balance;
  if (balances) {
    EK_ASSIGN_OR_RETURN(balance, Balance::Create(&comm, {.batch = equal.even * comm.world_size()}));
  }
  EK_RETURN_IF_ERROR(comm.control().Exchange("block", "", comm.timeout()).status());
  const ControlCounters before = comm.control().link().Counters();
  const int64_t issued = comm.flight().issued();
  EK_ASSIGN_OR_RETURN(const std::vector<SleptStep> steps,
                      training.Run(equal, balance.get(), FLAGS_cost_steps));
  const ControlCounters after = comm.control().link().Counters();
  side.messages += static_cast<double>(after.messages_sent - before.messages_sent);
  side.bytes += static_cast<double>(after.bytes_sent - before.bytes_sent);
  side.collectives += static_cast<double>(comm.flight().issued() - issued);
  side.seconds.push_back((steps.back().end_ms - steps.front().end_ms) / 1000);
  return absl::OkStatus();
}

absl::Status MeasureCost(Communicator& comm, SleptTraining& training) {
  Side sides[2];  // Without Balance, and with it.
  EK_RETURN_IF_ERROR(RunRounds(2, FLAGS_pairs, [&](size_t i, int) {
    return RunBlock(comm, training, sides[i], /*balances=*/i == 1);
  }));
  if (comm.rank() != 0) return absl::OkStatus();
  const double steps = FLAGS_pairs * FLAGS_cost_steps;
  std::cout << absl::StrFormat(
      "\n%s, equal speeds, steps of %.2f ms: with Balance / without it %s\n", FLAGS_group,
      1000 * MedianOf(sides[0].seconds) / (FLAGS_cost_steps - 1),
      RatioOf(sides[1].seconds, sides[0].seconds).ToString());
  for (const Side& side : sides) {
    std::cout << absl::StrFormat(
        "%-8s %.2f control messages with %.1f bytes, and %.2f collectives, of a rank and step\n",
        &side == sides ? "without" : "with", side.messages / steps, side.bytes / steps,
        side.collectives / steps);
  }
  return absl::OkStatus();
}

absl::Status RunRank(const Environment& environment) {
  const std::string backend = FLAGS_group.substr(0, FLAGS_group.find(':'));
  // Hosts have no core in common: ranks that have a core each spin for a while when they wait.
  if (backend == "hierarchical")
    PinTo(environment.rank % kHostParts % static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = backend}));
  {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<SleptTraining> training,
                        SleptTraining::Create(comm.get()));
    EK_RETURN_IF_ERROR(MeasureRows(*comm, *training));
    if (FLAGS_group == "shm:2" && FLAGS_pairs > 0)
      EK_RETURN_IF_ERROR(MeasureCost(*comm, *training));
  }
  return comm->Finalize();
}

absl::Status RunGroups(const std::vector<std::string>& arguments) {
  std::vector<std::pair<std::string, int>> groups;
  for (const std::string& group : ListOf(FLAGS_groups)) {
    const std::vector<std::string> parts = absl::StrSplit(group, ':');
    int ranks = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[1], &ranks) || ranks < 2) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--groups: \"", group, "\" must be a backend and a number of ranks, as in shm:2"));
    }
    groups.emplace_back(group, ranks);
  }
  for (const auto& [group, ranks] : groups) {
    std::vector<std::string> command = arguments;
    command[0] = OwnPath();
    command.push_back(absl::StrCat("--group=", group));
    std::map<std::string, std::string> variables;
    if (absl::StartsWith(group, "hierarchical"))
      variables["EVENKEEL_HOST_PARTS"] = absl::StrCat(kHostParts);
    EK_RETURN_IF_ERROR(RunRankProcesses(
        group, {.ranks = ranks, .command = std::move(command), .variables = std::move(variables)}));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  if (FLAGS_neighbour > 0) {
    EndWithParent();
    BeBusyNeighbour(FLAGS_neighbour);
  }
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_RETURN_IF_ERROR(environment.launcher.empty() ? RunGroups(arguments) : RunRank(environment));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Main(argc, argv); });
}
