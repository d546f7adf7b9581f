// Measures the speed of collectives, backend by backend, beside Gloo itself and the MPIs of this
// machine. See kUsage; tools/bench/sweep.h describes the measurement.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/available_memory.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/rendezvous/rendezvous.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/launch/launcher.h"
#include "evenkeel/launch/signal_reader.h"
#include "evenkeel/tools/bench/mpi.h"
#include "evenkeel/tools/bench/raw_gloo.h"
#include "evenkeel/tools/bench/request.h"
#include "evenkeel/tools/bench/rows.h"
#include "evenkeel/tools/bench/sweep.h"
#include "evenkeel/tools/bench/transport.h"
#include "evenkeel/tools/measure/rank_job.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"

DEFINE_string(backends, "auto",
              "Backends to measure: auto, or tcp,shm,raw_gloo,openmpi,mpich,mpi.");
DEFINE_string(
    ops, "all",
    "all, or all_reduce,reduce_scatter,all_gather,broadcast,reduce,all_to_all,send_recv,barrier.");
DEFINE_int32(world, 2, "Ranks, from 2 to 64.");
DEFINE_string(sizes, "1K,4K,16K,64K,256K,1M,4M,16M,64M,256M",
              "Bytes; K, M and G are powers of 1024.");
DEFINE_string(loop_sizes, "1K",
              "Sizes at which all_reduce is also timed in a tight loop, as a program calls it.");
DEFINE_string(registered, "shm",
              "Backends that are measured in memory from Communicator::Allocate() as well.");
DEFINE_int32(pairs, 10, "Rounds for each collective and size.");
DEFINE_double(min_time, 0.01, "The least time of a block of repetitions, in seconds.");
DEFINE_bool(quick, false, "1K,64K,4M in 3 rounds, unless --sizes or --pairs is set.");
DEFINE_string(json, "", "A file for the rows: an array with one object per line.");
DEFINE_string(folder, "", "Set for the ranks that it starts: their common folder.");
DEFINE_string(mpi, "", "Set for the ranks that it starts: the MPI that has started them.");

namespace evenkeel::bench {
namespace {

constexpr char kUsage[] =
    R"(Measures collectives: every backend at every size in one run, beside Gloo itself and MPI.

  bench_collectives [--world=2] [--backends=auto] [--ops=all] [--sizes=1K,64K,4M] [--json=FILE] [--quick]

Backends: tcp, shm the backends of comm/factory.h
          raw_gloo  Gloo's ring over its own TCP on loopback
          openmpi, mpich, mpi
                    mpirun.openmpi, mpirun.mpich, or any other mpirun. A small library is compiled with the MPI's own
                    mpicxx. A missing MPI is left out, and a line reports it
          auto      all of these that this machine has

Ranks are processes of this host, pinned to no core, and each of them has all backends. With MPIs there is a run for each
MPI, whose mpirun starts the ranks. For each collective and size there are rounds; in each round every backend has a block
of repetitions in turn. Before each repetition all ranks meet in a barrier that is the same for all backends and not
timed; the slowest rank's time counts. Rows marked (loop) are means of calls back to back instead. Results of a fresh run
are checked at each size, value by value: a wrong one ends the program. With Gloo and the MPIs only all_reduce is
measured; python/bench/bench.py compares more collectives with them.

size        the whole buffer; of all_gather the output, of reduce_scatter the input (as in nccl-tests)
registered  whether buffers come from Communicator::Allocate()
median us   over all repetitions
algbw       size / time, in 10^9 bytes a second
busbw       algbw times 2 (n - 1) / n for all_reduce; (n - 1) / n for reduce_scatter, all_gather and all_to_all; 1 for
            the others, for n ranks (as in nccl-tests)
spread      interquartile range of the repetitions over their median

At the end each backend is compared with raw_gloo and the MPI: the median ratio of the times of blocks in the same round,
with its 95 % interval (bootstrap). Use --pairs=30 for figures that are to be quoted.
)";

constexpr int kMostRanks = 64;
constexpr absl::Duration kConnectTimeout = absl::Seconds(30);

bool IsMpi(const std::string& backend) {
  return backend == "openmpi" || backend == "mpich" || backend == "mpi";
}

bool Has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

struct Request {
  std::vector<std::string> backends, registered;
  std::vector<Cell> cells;
};

absl::StatusOr<Request> ReadFlags() {
  if (FLAGS_world < 2 || FLAGS_world > kMostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--world=", FLAGS_world, ": choose 2 to ", kMostRanks));
  }
  if (FLAGS_pairs < 1) return absl::InvalidArgumentError("--pairs must be at least 1");
  if (!(FLAGS_min_time > 0)) return absl::InvalidArgumentError("--min_time must be more than 0");
  if (FLAGS_quick) {
    gflags::SetCommandLineOptionWithMode("sizes", "1K,64K,4M", gflags::SET_FLAG_IF_DEFAULT);
    gflags::SetCommandLineOptionWithMode("pairs", "3", gflags::SET_FLAG_IF_DEFAULT);
  }
  std::vector<std::string> all = {"shm", "tcp", "raw_gloo"};
  for (const Mpi& mpi : FindMpis(EnvironmentVariable("PATH"))) all.push_back(mpi.name);
  if (!IsMpi(all.back())) all.push_back("mpi");  // Which then says why it is left out.
  Request request;
  EK_ASSIGN_OR_RETURN(request.backends, ParseBackends("backends", FLAGS_backends, all));
  if (request.backends.empty())
    return absl::InvalidArgumentError("--backends must name at least one backend");
  EK_ASSIGN_OR_RETURN(request.registered,
                      ParseBackends("registered", FLAGS_registered, request.backends));
  EK_ASSIGN_OR_RETURN(const std::vector<Op> ops, ParseOps(FLAGS_ops));
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, ParseSizes("sizes", FLAGS_sizes));
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> loop_sizes,
                      ParseSizes("loop_sizes", FLAGS_loop_sizes));
  request.cells = CellsOf(ops, sizes, loop_sizes);
  return request;
}

// The ranks -------------------------------------------------------------------------------------

// One of the job's ranks, with a connection for each backend.
class BenchRank {
 public:
  explicit BenchRank(Request request) : request_(std::move(request)) {}

  // An error ends the process without destructors: MPI_Finalize() would wait for ranks that wait
  // for this one. Its exit code makes the launcher or mpirun end them.
  absl::Status Run() {
    const absl::Status status = MeasureAndFinalize();
    if (status.ok()) return status;
    std::cout << std::flush;
    const int code = RunProgram([&]() -> absl::StatusOr<int> { return status; });
    for (const auto& comm : group_) comm->Abort(status);
    if (comm_ != nullptr) comm_->Abort(status);
    _exit(code);
  }

 private:
  absl::Status MeasureAndFinalize() {
    EK_RETURN_IF_ERROR(Connect());
    EK_RETURN_IF_ERROR(Measure());
    contenders_.clear();
    for (const auto& comm : group_) EK_RETURN_IF_ERROR(comm->Finalize(kConnectTimeout));
    return comm_->Finalize(kConnectTimeout);
  }

  absl::Status Connect() {
    MpiRank mpi;
    if (!FLAGS_mpi.empty()) {
      EK_ASSIGN_OR_RETURN(mpi, StartMpi(FLAGS_folder + "/mpi.so"));
    } else {
      EK_ASSIGN_OR_RETURN(const Environment launched, ReadEnvironment());
      mpi.rank = launched.rank;
    }
    const std::string rank = absl::StrCat(mpi.rank), world = absl::StrCat(FLAGS_world);
    EK_ASSIGN_OR_RETURN(
        environment_,
        ParseEnvironment({{"RANK", rank},
                          {"LOCAL_RANK", rank},
                          {"WORLD_SIZE", world},
                          {"LOCAL_WORLD_SIZE", world},
                          {"EVENKEEL_STORE", FLAGS_folder},
                          {"EVENKEEL_JOB", std::filesystem::path(FLAGS_folder).filename()}},
                         {.user = static_cast<int>(geteuid())}));
    EK_ASSIGN_OR_RETURN(rendezvous_, Rendezvous::Join(environment_, kConnectTimeout));
    EK_ASSIGN_OR_RETURN(comm_, Create("none"));
    EK_ASSIGN_OR_RETURN(const Meeting meeting, Meeting::Create(comm_.get(), FLAGS_folder));
    for (const std::string& backend : request_.backends) {
      if (IsMpi(backend) && backend != FLAGS_mpi) continue;
      std::unique_ptr<Transport> transport;
      if (IsMpi(backend)) {
        transport = std::move(mpi.transport);
      } else {
        EK_ASSIGN_OR_RETURN(transport, ConnectTo(backend));
      }
      Transport* const added = transports_.emplace_back(std::move(transport)).get();
      for (const bool registered : {false, true}) {
        if (registered && !Has(request_.registered, backend)) continue;
        contenders_.push_back(std::make_unique<RankContender>(backend, added, registered, meeting));
      }
      if (IsMpi(backend) || backend == "raw_gloo") bases_.push_back(backend);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Create(const std::string& backend) {
    return CreateCommunicator(environment_, {.backend = backend,
                                             .group = backend,
                                             .connect_timeout = kConnectTimeout,
                                             .rendezvous = rendezvous_});
  }

  absl::StatusOr<std::unique_ptr<Transport>> ConnectTo(const std::string& backend) {
    if (backend == "raw_gloo")
      return ConnectRawGloo(FLAGS_folder + "/gloo", environment_.rank, FLAGS_world);
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, Create(backend));
    return OverCommunicator(*group_.emplace_back(std::move(comm)));
  }

  absl::Status Measure() {
    const bool prints = environment_.rank == 0;
    std::string title;  // A headline for each collective.
    SweepObserver observer;
    if (prints) {
      std::cout << FLAGS_world << " ranks, float32, " << std::thread::hardware_concurrency()
                << " processors" << (FLAGS_mpi.empty() ? "" : ", started by ") << FLAGS_mpi << "\n";
      observer.on_cell = [&](std::span<const Row> rows) {
        if (rows.empty()) return;
        if (title != NameOf(rows[0].what.op)) std::cout << "\n" << Headline();
        title = NameOf(rows[0].what.op);
        for (const Row& row : rows) std::cout << TextOf(row);
        std::cout << std::flush;
      };
      observer.on_left_out = [](const std::string& sentence) {
        std::cout << "left out: " << sentence << std::endl;
      };
    }
    std::vector<Contender*> contenders;
    for (const auto& contender : contenders_) contenders.push_back(contender.get());
    SweepOptions options{.world = FLAGS_world,
                         .block_time = absl::Seconds(FLAGS_min_time),
                         .pairs = FLAGS_pairs,
                         .bases = bases_};
    const auto left = static_cast<double>(internal::ReadAvailableMemory().bytes);
    EK_ASSIGN_OR_RETURN(const Numbers least, LargestOf(*comm_, {-left}));
    options.memory = static_cast<int64_t>(-least[0] / 2);  // A transport needs about as much again.
    EK_ASSIGN_OR_RETURN(std::vector<Row> rows,
                        RunSweep(contenders, request_.cells, options, observer));
    for (Row& row : rows) row.mpi = FLAGS_mpi;
    if (!prints) return absl::OkStatus();
    if (!bases_.empty()) {
      std::cout
          << "\nTimes over those of " << absl::StrJoin(bases_, ", ")
          << ": medians of the ratios of blocks in the same round, with their 95 % intervals\n\n"
          << RatioTable(rows, bases_) << std::endl;
    }
    std::ofstream file(FLAGS_folder + "/rows");
    for (const Row& row : rows) file << JsonOf(row) << "\n";
    file.close();
    return file ? absl::OkStatus()
                : absl::UnavailableError(absl::StrCat("cannot write ", FLAGS_folder, "/rows"));
  }

  const Request request_;
  Environment environment_;
  std::shared_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<Communicator> comm_;  // The control plane alone.
  std::vector<std::unique_ptr<Communicator>> group_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<RankContender>> contenders_;
  std::vector<std::string> bases_;
};

// The program that starts them --------------------------------------------------------------------

struct Job {
  std::string mpi;  // Empty: the launcher starts the ranks.
  std::vector<std::string> mpirun;
  std::unique_ptr<TemporaryFolder> folder;
};

absl::StatusOr<Job> Prepare(const Mpi& mpi) {
  Job job{.mpi = mpi.name};
  if (!mpi.name.empty()) EK_RETURN_IF_ERROR(CheckThere(mpi, EnvironmentVariable("PATH")));
  EK_ASSIGN_OR_RETURN(job.folder, TemporaryFolder::Create("bench_collectives"));
  if (mkdir((job.folder->path() + "/gloo").c_str(), 0700) != 0)
    return absl::ErrnoToStatus(errno, job.folder->path());
  if (mpi.name.empty()) return job;
  EK_RETURN_IF_ERROR(CompileMpiLibrary(mpi, job.folder->path()).status());
  EK_ASSIGN_OR_RETURN(job.mpirun, MpiCommand(mpi, FLAGS_world));
  return job;
}

// Returns the jobs that can be run.
absl::StatusOr<std::vector<Job>> PrepareAll(const std::vector<std::string>& backends) {
  SignalReader signals;  // One that came would leave the folders.
  std::vector<Job> jobs;
  for (const Mpi& mpi : KnownMpis()) {
    if (!Has(backends, mpi.name)) continue;
    absl::StatusOr<Job> job = Prepare(mpi);
    if (!signals.Wait(SteadyNow()).empty()) return absl::CancelledError("ended by a signal");
    if (job.ok()) {
      jobs.push_back(*std::move(job));
    } else {
      std::cout << mpi.name << " is not measured: " << job.status().message() << std::endl;
    }
  }
  if (!jobs.empty()) return jobs;
  if (std::all_of(backends.begin(), backends.end(), IsMpi))
    return absl::InvalidArgumentError("nothing to measure; see --backends and --ops");
  EK_ASSIGN_OR_RETURN(jobs.emplace_back(), Prepare({}));
  return jobs;
}

// Adds its rows.
absl::Status RunJob(const Job& job, std::vector<std::string> arguments,
                    std::vector<std::string>& rows) {
  arguments[0] = OwnPath();
  arguments.push_back(absl::StrCat("--folder=", job.folder->path()));
  arguments.push_back(absl::StrCat("--mpi=", job.mpi));
  LaunchOptions launch{.ranks = FLAGS_world, .command = job.mpirun};
  std::string name = "the ranks";
  if (!job.mpi.empty()) {
    launch.ranks = 1;
    name = job.mpirun[0];
  }
  launch.command.insert(launch.command.end(), arguments.begin(), arguments.end());
  EK_RETURN_IF_ERROR(RunRankProcesses(name, launch));
  EK_ASSIGN_OR_RETURN(const std::string text, ReadInput(job.folder->path() + "/rows"));
  for (const absl::string_view row : absl::StrSplit(text, '\n', absl::SkipEmpty()))
    rows.emplace_back(row);
  return absl::OkStatus();
}

absl::Status RunAll(const Request& request, const std::vector<std::string>& arguments) {
  std::ofstream json;
  if (!FLAGS_json.empty()) {
    json.open(FLAGS_json);  // Now, so that minutes of measuring are not lost.
    if (!json) return absl::InvalidArgumentError(absl::StrCat("cannot write --json=", FLAGS_json));
  }
  EK_ASSIGN_OR_RETURN(const std::vector<Job> jobs, PrepareAll(request.backends));
  std::vector<std::string> rows, all = arguments;
  all.push_back(absl::StrCat("--backends=", absl::StrJoin(request.backends, ",")));
  absl::Status status;
  for (const Job& job : jobs) {
    status = RunJob(job, all, rows);
    if (!status.ok()) break;
  }
  if (FLAGS_json.empty()) return status;
  json << "[\n" << absl::StrJoin(rows, ",\n") << "\n]\n";  // Also those before an error.
  json.close();
  if (!json) status.Update(absl::UnavailableError(absl::StrCat("cannot write ", FLAGS_json)));
  return status;
}

absl::StatusOr<int> Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  if (PrintsHelp(kUsage, argc, argv)) {
    std::vector<gflags::CommandLineFlagInfo> flags;
    gflags::GetAllFlags(&flags);
    std::cout << "\nFlags:\n";
    for (const gflags::CommandLineFlagInfo& flag : flags) {
      if (absl::EndsWith(flag.filename, "bench_collectives.cc"))
        std::cout << "  --" << flag.name << "=" << flag.default_value << "\n      "
                  << flag.description << "\n";
    }
    return EXIT_SUCCESS;
  }
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  EK_ASSIGN_OR_RETURN(Request request, ReadFlags());
  EK_RETURN_IF_ERROR(FLAGS_folder.empty() ? RunAll(request, arguments)
                                          : BenchRank(std::move(request)).Run());
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel::bench

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::bench::Main(argc, argv); });
}
