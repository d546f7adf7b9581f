// Measures how the control plane grows with the number of ranks: real connections to one hub, and
// no data plane. See --help.
//
// This process hosts the hub, so its processor time and memory are the hub's. The ranks are threads
// of child processes, which run one phase after another as this process requests it over a pipe.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/steps/step_log.h"
#include "evenkeel/tests/child_processes.h"
#include "gflags/gflags.h"

DEFINE_int32(ranks, 1024, "Ranks of the group.");
DEFINE_int32(processes, 8, "Processes that run the ranks, each rank on a thread.");
DEFINE_int32(fanout, 32, "Fanout of the tree of exchanges; --ranks or more: no tree.");
DEFINE_int32(rounds, 10, "Number of exchanges or steps in a phase.");
DEFINE_int32(bytes, 157, "Size of each rank's part of an exchange.");
DEFINE_int32(seconds, 5, "Duration of the phases beat and wait.");
DEFINE_int32(beat, 1, "Seconds between heartbeats.");
DEFINE_int32(silence, 60, "Seconds without a heartbeat after which a rank or the hub is lost.");
DEFINE_int32(timeout, 300, "Limit of each phase, in seconds.");
DEFINE_string(phases, "exchange,equal,step,shadow,leave,beat,wait,lose",
              "Phases between start and end, in this order.");
DEFINE_int32(process, -1, "The number of a child process; internal.");
DEFINE_string(address, "", "The hub's address; internal.");

namespace evenkeel {
namespace {

constexpr char kUsage[] = R"(Measures how the control plane grows with the number of ranks.

  bazel run //tests/scale -- --ranks=1024

Each line is a phase: its duration on the slowest rank, the hub's processor time, and other
figures of the phase.
  start     connect to the store and to the hub, until all ranks have arrived
  exchange  --rounds exchanges of --bytes different bytes of each rank
  equal     the same, with equal bytes from all ranks
  step      the agreement of a training step, all ranks with inputs
  shadow    the same, with every second rank exhausted: it shadows the others
  leave     the ranks with inputs split off, and run the same steps
  beat      --seconds of heartbeats while no rank waits
  wait      the same while all ranks wait for the last one, and log it
  lose      the last rank's connection breaks, until all others have noticed it; then Shrink()
  end       Finalize()
)";

constexpr char kSecret[] = "scale";
constexpr int kActions = 3;  // Actions that exhausted ranks repeat in a step, e.g. of an optimizer.

absl::Duration Timeout() { return absl::Seconds(FLAGS_timeout); }

// In a job, at most one rank shares its processor with the hub; here thousands do.
void PreferTheHub() { setpriority(PRIO_PROCESS, 0, FLAGS_process < 0 ? -10 : 0); }

// The file limit is the first limit that many ranks in few processes reach.
void RaiseFileLimit() {
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

double Resident() {  // In MiB.
  std::ifstream file("/proc/self/statm");
  double total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

double CpuSeconds() {
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  return absl::ToDoubleSeconds(absl::DurationFromTimeval(used.ru_utime) +
                               absl::DurationFromTimeval(used.ru_stime));
}

// A child process ---------------------------------------------------------------------------------

class NoData final : public Backend {
 public:
  absl::string_view name() const override { return "no data"; }
  absl::Status Supports(const Collective&) const override {
    return absl::UnimplementedError("this backend moves no data");
  }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override {
    work->Finish(Supports(operation.what));
  }
  void Abort(const absl::Status&) override {}
};

class Participant : public StepParticipant {
 public:
  const std::string& participant_name() const override { return name_; }
  absl::StatusOr<ParticipantState> PrepareStep() override { return CurrentState(); }
  ParticipantState CurrentState() const override { return {.generation = 1}; }
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view) override { return absl::OkStatus(); }

 private:
  const std::string name_ = "participant";
};

struct Rank {
  int rank = 0;
  std::unique_ptr<TcpStore> store;
  std::unique_ptr<Communicator> comm;
  Participant participant;
  std::vector<double> seconds;  // Durations of the rounds of the last phase.
  absl::Time event;             // The time of its last event.
  absl::Status status;
};

std::unique_ptr<Communicator> MakeGroup(absl::string_view group, int rank, int world_size,
                                        std::unique_ptr<ControlLink> link) {
  CommunicatorOptions options{.timeout = Timeout()};
  options.watch.stall_warning = absl::Seconds(2);
  options.watch.beat = absl::Seconds(FLAGS_beat);
  options.watch.silence = absl::Seconds(FLAGS_silence);
  options.watch.warn = [](const std::string&) {};
  return std::make_unique<Communicator>(
      std::make_unique<NoData>(),
      std::make_unique<ControlChannel>(rank, world_size, std::move(link)), options, group,
      [](absl::string_view next, int next_rank, int next_world_size,
         std::unique_ptr<ControlLink> next_link, absl::Duration) {
        return MakeGroup(next, next_rank, next_world_size, std::move(next_link));
      });
}

absl::Status Start(Rank& self) {
  const TcpStoreOptions options{.addresses = {FLAGS_address},
                                .secret = kSecret,
                                .rank = self.rank,
                                .world_size = FLAGS_ranks,
                                .timeout = Timeout(),
                                .fanout = FLAGS_fanout};
  EK_ASSIGN_OR_RETURN(self.store, TcpStore::Connect(options));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ControlLink> link, TcpControlLink::Connect(options));
  self.comm = MakeGroup("world", self.rank, FLAGS_ranks, std::move(link));
  return internal::AwaitArrival(self.comm->control(), "arrival", "", {"world", Timeout()}).status();
}

// Runs and times `round` --rounds times, after a warm-up round.
absl::Status Repeat(Rank& self, const std::function<absl::Status()>& round) {
  for (int i = -1; i < FLAGS_rounds; ++i) {
    const absl::Time start = absl::Now();
    EK_RETURN_IF_ERROR(round());
    if (i >= 0) self.seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));
  }
  return absl::OkStatus();
}

absl::Status Exchanges(Rank& self, bool are_equal) {
  std::string mine(FLAGS_bytes, 'x');
  if (!are_equal) {
    const std::string rank = absl::StrCat(self.rank, " ");
    mine.replace(0, std::min(rank.size(), mine.size()), rank);
  }
  return Repeat(self,
                [&] { return self.comm->control().Exchange("scale", mine, Timeout()).status(); });
}

absl::Status ActiveStep(StepControl& steps) {
  EK_ASSIGN_OR_RETURN(const std::shared_ptr<StepTicket> ticket, steps.Enter("participant", 0));
  EK_RETURN_IF_ERROR(ticket->Wait().status());
  for (int i = 0; i < kActions; ++i) EK_RETURN_IF_ERROR(steps.Announce("participant", "0.001"));
  steps.EndStep();
  return absl::OkStatus();
}

absl::Status ShadowedStep(StepControl& steps) {
  EK_ASSIGN_OR_RETURN(const std::shared_ptr<StepTicket> ticket, steps.EnterJoined());
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  while (true) {
    EK_ASSIGN_OR_RETURN(const StepEntry entry, steps.NextEntry(answer));
    if (entry.kind == StepEntry::Kind::kEnd) return absl::OkStatus();
  }
}

absl::Status Steps(Rank& self, Communicator& comm, bool shadows) {
  StepControl& steps = StepControl::Of(comm);
  steps.Register(&self.participant);
  const absl::Status status =
      Repeat(self, [&] { return shadows ? ShadowedStep(steps) : ActiveStep(steps); });
  steps.Unregister(&self.participant);
  return status;
}

bool IsExhausted(const Rank& self) { return self.rank % 2 == 1; }

absl::Status Leave(Rank& self) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> rest,
                      self.comm->Split(IsExhausted(self) ? kNoColor : 0, 0, Timeout()));
  if (rest == nullptr) return absl::OkStatus();
  EK_RETURN_IF_ERROR(Steps(self, *rest, /*shadows=*/false));
  return rest->Finalize(Timeout());
}

absl::Status WaitForTheLast(Rank& self) {
  const bool is_last = self.rank == FLAGS_ranks - 1;
  if (is_last) absl::SleepFor(absl::Seconds(FLAGS_seconds));
  const absl::Time start = absl::Now();
  EK_RETURN_IF_ERROR(self.comm->control().Exchange("late", "", Timeout()).status());
  if (is_last) self.seconds = {absl::ToDoubleSeconds(absl::Now() - start)};
  return absl::OkStatus();
}

absl::Status Lose(Rank& self) {
  EK_RETURN_IF_ERROR(self.comm->control().Exchange("lose", "", Timeout()).status());
  if (self.rank == FLAGS_ranks - 1) {
    absl::SleepFor(absl::Milliseconds(500));  // Until the others wait for it.
    self.event = absl::Now();
    self.comm->control().Stop();  // Without a message to the hub.
    return absl::OkStatus();
  }
  const absl::Status lost = self.comm->control().Exchange("lost", "", Timeout()).status();
  self.event = absl::Now();
  return absl::IsUnavailable(lost) ? absl::OkStatus() : lost;
}

absl::Status Shrink(Rank& self) {
  if (self.rank == FLAGS_ranks - 1) {
    self.comm = nullptr;
    return absl::OkStatus();
  }
  EK_ASSIGN_OR_RETURN(self.comm, self.comm->Shrink(Timeout()));
  return absl::OkStatus();
}

absl::Status End(Rank& self) {
  EK_RETURN_IF_ERROR(self.comm == nullptr ? absl::OkStatus() : self.comm->Finalize(Timeout()));
  self.event = absl::Now();
  self.comm = nullptr;
  self.store = nullptr;
  return absl::OkStatus();
}

absl::Status RunPhase(const std::string& phase, Rank& self) {
  self.seconds.clear();
  self.event = absl::InfinitePast();
  if (phase == "start") return Start(self);
  if (phase == "exchange") return Exchanges(self, /*are_equal=*/false);
  if (phase == "equal") return Exchanges(self, /*are_equal=*/true);
  if (phase == "step") return Steps(self, *self.comm, /*shadows=*/false);
  if (phase == "shadow") return Steps(self, *self.comm, IsExhausted(self));
  if (phase == "leave") return Leave(self);
  if (phase == "beat") {
    absl::SleepFor(absl::Seconds(FLAGS_seconds));
    return absl::OkStatus();
  }
  if (phase == "wait") return WaitForTheLast(self);
  if (phase == "lose") return Lose(self);
  if (phase == "shrink") return Shrink(self);
  if (phase == "end") return End(self);
  return absl::InvalidArgumentError(absl::StrCat("--phases: \"", phase, "\" is not a phase"));
}

double Quantile(std::vector<double>& values, double quantile) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(quantile * static_cast<double>(values.size() - 1))];
}

// Reads phases, and writes a line with the figures of each: "name=value ...".
absl::StatusOr<int> Child() {
  EndWithParent();
  std::vector<Rank> ranks;
  for (int rank = FLAGS_process; rank < FLAGS_ranks; rank += FLAGS_processes) {
    ranks.emplace_back();
    ranks.back().rank = rank;
  }
  std::string phase;
  while (std::getline(std::cin, phase)) {
    const double cpu = CpuSeconds();
    std::vector<std::thread> threads;
    for (Rank& rank : ranks)
      threads.emplace_back([&rank, &phase] { rank.status = RunPhase(phase, rank); });
    for (std::thread& thread : threads) thread.join();
    std::vector<double> seconds;
    absl::Time first = absl::InfiniteFuture(), last = absl::InfinitePast();
    for (const Rank& rank : ranks) {
      if (!rank.status.ok())
        return Annotate(rank.status, absl::StrCat("rank ", rank.rank, ", ", phase));
      seconds.insert(seconds.end(), rank.seconds.begin(), rank.seconds.end());
      first = std::min(first, rank.event);
      last = std::max(last, rank.event);
    }
    std::cout << absl::StrFormat("cpu=%f resident=%f median=%f p99=%f first=%d last=%d",
                                 CpuSeconds() - cpu, Resident(), Quantile(seconds, 0.5),
                                 Quantile(seconds, 0.99), absl::ToUnixMicros(first),
                                 absl::ToUnixMicros(last))
              << std::endl;
  }
  return EXIT_SUCCESS;
}

// The process of the hub --------------------------------------------------------------------------

// Runs phases on all children, and collects their figures.
class Ranks {
 public:
  absl::Status Start(const std::string& address) {
    for (int process = 0; process < FLAGS_processes; ++process) {
      EK_RETURN_IF_ERROR(children_.Start(
          {ThisProgram(), absl::StrCat("--process=", process), absl::StrCat("--address=", address),
           absl::StrCat("--ranks=", FLAGS_ranks), absl::StrCat("--processes=", FLAGS_processes),
           absl::StrCat("--fanout=", FLAGS_fanout), absl::StrCat("--rounds=", FLAGS_rounds),
           absl::StrCat("--bytes=", FLAGS_bytes), absl::StrCat("--seconds=", FLAGS_seconds),
           absl::StrCat("--beat=", FLAGS_beat), absl::StrCat("--silence=", FLAGS_silence),
           absl::StrCat("--timeout=", FLAGS_timeout)},
          {}));
    }
    return absl::OkStatus();
  }

  struct Figures {
    double seconds = 0, hub_cpu = 0;              // Sums over the phase.
    double cpu = 0, resident = 0;                 // Sums of the children.
    double median = 0, p99 = 0;                   // Maxima of the children.
    int64_t first = INT64_MAX, last = INT64_MIN;  // Events, in microseconds.
  };
  absl::StatusOr<Figures> Run(const std::string& phase) {
    Figures all;
    const double hub_cpu = CpuSeconds();
    const absl::Time start = absl::Now();
    for (int child = 0; child < children_.count(); ++child)
      children_.Tell(child, absl::StrCat(phase, "\n"));
    int done = 0;
    const auto on_line = [&](int, absl::string_view line) {
      ++done;
      for (absl::string_view field : absl::StrSplit(line, ' ')) {
        const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(field, '=');
        double value = 0;
        if (!absl::SimpleAtod(parts.second, &value)) continue;
        if (parts.first == "cpu") all.cpu += value;
        if (parts.first == "resident") all.resident += value;
        if (parts.first == "median") all.median = std::max(all.median, value);
        if (parts.first == "p99") all.p99 = std::max(all.p99, value);
        if (parts.first == "first") all.first = std::min(all.first, static_cast<int64_t>(value));
        if (parts.first == "last") all.last = std::max(all.last, static_cast<int64_t>(value));
      }
    };
    const auto is_over = [&] {
      for (int child = 0; child < children_.count(); ++child) {
        if (!children_.is_running(child)) return true;
      }
      return done == children_.count();
    };
    const bool in_time = children_.Listen(start + 2 * Timeout(), on_line, is_over);
    all.seconds = absl::ToDoubleSeconds(absl::Now() - start);
    all.hub_cpu = CpuSeconds() - hub_cpu;
    if (done == children_.count()) return all;
    for (int child = 0; child < children_.count(); ++child) {
      if (!children_.is_running(child))
        return absl::UnavailableError(absl::StrCat(phase, ": ", children_.complaints(child)));
    }
    return absl::DeadlineExceededError(
        absl::StrCat(phase, in_time ? ": ended early" : ": no result in time; raise --timeout"));
  }

 private:
  ChildProcesses children_;
};

void Print(const std::string& phase, const Ranks::Figures& figures, const std::string& more) {
  std::cout << absl::StrFormat("%-9s %8.3f s, hub %7.3f s, ranks %8.3f s of processor time%s\n",
                               phase, figures.seconds, figures.hub_cpu, figures.cpu, more)
            << std::flush;
}

std::string PerRound(const Ranks::Figures& figures) {
  const double rounds = FLAGS_rounds + 1;  // With the warm-up round.
  return absl::StrFormat("; median %.2f ms, p99 %.2f ms, hub %.2f ms each", 1e3 * figures.median,
                         1e3 * figures.p99, 1e3 * figures.hub_cpu / rounds);
}

absl::Status Measure(const std::string& phase, Ranks& ranks) {
  EK_ASSIGN_OR_RETURN(const Ranks::Figures figures, ranks.Run(phase));
  if (phase == "lose") {
    Print(phase, figures,
          absl::StrFormat("; noticed after %.3f s", 1e-6 * (figures.last - figures.first)));
    return Measure("shrink", ranks);
  }
  Print(phase, figures,
        phase == "start" || phase == "beat" || phase == "shrink" || phase == "end" ? ""
        : phase == "wait" ? absl::StrFormat("; released after %.2f ms", 1e3 * figures.median)
                          : PerRound(figures));
  if (phase == "start") {
    std::cout << absl::StrFormat("memory: %.3f MiB per rank, hub %.1f MiB\n",
                                 figures.resident / FLAGS_ranks, Resident());
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Main(int argc, char** argv) {
  gflags::SetUsageMessage(kUsage);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  RaiseFileLimit();
  PreferTheHub();
  if (FLAGS_process >= 0) return Child();
  if (FLAGS_ranks < 2 || FLAGS_processes < 1 || FLAGS_processes > FLAGS_ranks || FLAGS_rounds < 1)
    return absl::InvalidArgumentError(
        "--ranks must be at least 2, --rounds at least 1, --processes from 1 to --ranks");
  EK_ASSIGN_OR_RETURN(const auto server,
                      TcpStoreServer::Create(
                          {.secret = kSecret, .world_size = FLAGS_ranks, .host = "the launcher"}));
  Ranks ranks;
  EK_RETURN_IF_ERROR(ranks.Start(server->address()));
  EK_RETURN_IF_ERROR(Measure("start", ranks));
  for (absl::string_view phase : absl::StrSplit(FLAGS_phases, ',', absl::SkipEmpty()))
    EK_RETURN_IF_ERROR(Measure(std::string(phase), ranks));
  EK_RETURN_IF_ERROR(Measure("end", ranks));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  const absl::StatusOr<int> code = evenkeel::Main(argc, argv);
  if (code.ok()) return *code;
  std::cerr << code.status() << std::endl;
  return EXIT_FAILURE;
}
