// How fast collectives are, backend by backend, beside Gloo itself, the MPIs of this machine and
// plain copies. See kUsage, and tools/bench/sweep.h for how it is measured.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/bench/as_rank.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/mpi.h"
#include "evenkeel/tools/bench/peer.h"
#include "evenkeel/tools/bench/process.h"
#include "evenkeel/tools/bench/rank_processes.h"
#include "evenkeel/tools/bench/request.h"
#include "evenkeel/tools/bench/rows.h"
#include "evenkeel/tools/bench/sweep.h"
#include "evenkeel/tools/launcher.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"

DEFINE_string(backends, "auto",
              "What is measured: auto, or local,tcp,shm,raw_gloo,openmpi,mpich,mpi,memcpy.");
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
DEFINE_string(dtype, "float32", "float32, float64, float16, bfloat16, int32 or int64.");
DEFINE_int32(
    pairs, 0,
    "Rounds for each collective and size; 0: from 3 to 30, as many as --time_limit has time for.");
DEFINE_double(time_limit, 200, "Seconds that the sweep may take with --pairs=0.");
DEFINE_double(min_time, 0.01, "Seconds that a block of repetitions takes at least.");
DEFINE_bool(quick, false,
            "1K,64K,4M within 25 seconds, where --sizes and --time_limit do not say otherwise.");
DEFINE_string(json, "", "A file for the rows: an array with one object to a line.");
DEFINE_string(mpirun, "", "Another mpirun for the backend mpi.");
DEFINE_string(mpicxx, "", "Another mpicxx for the backend mpi.");
DEFINE_string(mpi_args, "", "More arguments for each mpirun, separated by spaces.");

namespace evenkeel::bench {
namespace {

constexpr char kUsage[] =
    R"(Measures collectives: every backend at every size in one run, beside Gloo itself, MPI and plain copies.

  bench_collectives [--world=2] [--backends=auto] [--ops=all] [--sizes=1K,64K,4M] [--json=FILE] [--quick]

Backends: local     ranks are threads of one process
          tcp, shm the backends of comm/factory.h; ranks are processes
          raw_gloo  Gloo's own algorithms over TCP's own TCP on loopback
          openmpi, mpich, mpi
                    mpirun.openmpi, mpirun.mpich, or whatever is called mpirun. A small program is compiled with the
                    MPI's own mpicxx. An MPI that is not there is left out, with a line that says so
          memcpy    each rank copies the same bytes once, all at the same time
          auto      all of these that are there

Ranks are processes of this host, pinned to nothing. For each collective and size there are rounds; in each of them
every backend has a block of repetitions in turn, while the others sleep. Before each repetition all ranks meet in a
barrier that is the same for all backends and not timed; a repetition takes what the slowest rank takes. Rows marked
(loop) are means of calls back to back instead. Results of a fresh run are checked at each size, value by value: a wrong
one ends the program.

size        the whole buffer; of all_gather the output, of reduce_scatter the input (as in nccl-tests)
registered  whether buffers come from Communicator::Allocate()
median us   over all repetitions
algbw       size / time, in 10^9 bytes a second
busbw       algbw times 2 (n - 1) / n for all_reduce; (n - 1) / n for reduce_scatter, all_gather and all_to_all; 1 for
            the others, for n ranks (as in nccl-tests); memcpy: algbw
spread      interquartile range of the repetitions over their median

At the end each backend is compared with raw_gloo and the MPIs: the median ratio of times of blocks in the same round,
and the bootstrap's 95 % interval of it. --pairs=30 for figures that are to be quoted.
)";

// Removes the folder when a signal ends this process. Ranks end with their sockets.
void RemoveWithSignals(const std::string& folder) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals, folder] {
    int signal = 0;
    sigwait(&signals, &signal);
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
    _exit(128 + signal);
  }).detach();
}

// A process for each rank that meets the others in `folder`; of local, one with all of them.
std::vector<Program> OwnPrograms(const std::string& backend, const std::string& folder) {
  std::vector<Program> programs;
  const int processes = backend == "local" ? 1 : FLAGS_world;
  for (int rank = 0; rank < processes; ++rank) {
    programs.push_back(
        {.command = {OwnPath(), kAsRank, backend, folder, absl::StrCat(FLAGS_world)},
         .variables = {{"RANK", absl::StrCat(rank)},
                       {"LOCAL_RANK", absl::StrCat(rank)},
                       {"WORLD_SIZE", absl::StrCat(processes)},
                       {"LOCAL_WORLD_SIZE", absl::StrCat(processes)},
                       {"EVENKEEL_STORE", folder},
                       {"EVENKEEL_JOB", absl::StrCat("bench.", getpid(), ".", backend)}}});
  }
  return programs;
}

std::string SearchPath() {
  const char* const path = std::getenv("PATH");
  return path == nullptr ? "" : path;
}

class Bench {
 public:
  absl::Status Run() {
    EK_RETURN_IF_ERROR(ReadFlags());
    EK_ASSIGN_OR_RETURN(folder_, TemporaryFolder::Create("bench_collectives"));
    RemoveWithSignals(folder_->path());
    for (const std::string& backend : backends_) EK_RETURN_IF_ERROR(Start(backend));
    if (peers_.empty())
      return absl::InvalidArgumentError("nothing to measure; see --backends and --ops");
    return Measure();
  }

 private:
  absl::Status ReadFlags() {
    if (FLAGS_world < 2 || FLAGS_world > kMostRanks) {
      return absl::InvalidArgumentError(
          absl::StrCat("--world=", FLAGS_world, ": choose 2 to ", kMostRanks));
    }
    if (FLAGS_pairs < 0) return absl::InvalidArgumentError("--pairs must not be negative");
    if (!(FLAGS_min_time > 0) || !(FLAGS_time_limit > 0)) {
      return absl::InvalidArgumentError("--min_time and --time_limit must be more than 0");
    }
    if (FLAGS_quick) {
      gflags::SetCommandLineOptionWithMode("sizes", "1K,64K,4M", gflags::SET_FLAG_IF_DEFAULT);
      gflags::SetCommandLineOptionWithMode("time_limit", "25", gflags::SET_FLAG_IF_DEFAULT);
    }
    FindMpi();
    EK_ASSIGN_OR_RETURN(backends_, ParseBackends("backends", FLAGS_backends, WhatIsThere()));
    if (backends_.empty())
      return absl::InvalidArgumentError("--backends must name at least one backend");
    EK_ASSIGN_OR_RETURN(registered_, ParseBackends("registered", FLAGS_registered, backends_));
    EK_ASSIGN_OR_RETURN(ops_, ParseOps(FLAGS_ops));
    EK_ASSIGN_OR_RETURN(sizes_, ParseSizes("sizes", FLAGS_sizes));
    EK_ASSIGN_OR_RETURN(loop_sizes_, ParseSizes("loop_sizes", FLAGS_loop_sizes));
    EK_ASSIGN_OR_RETURN(scalar_, ParseScalar(FLAGS_dtype));
    if (FLAGS_json.empty()) return absl::OkStatus();
    json_.open(FLAGS_json);  // Now, so that minutes of measuring are not lost.
    return json_ ? absl::OkStatus()
                 : absl::InvalidArgumentError(absl::StrCat("cannot write --json=", FLAGS_json));
  }

  void FindMpi() {
    mpis_ = FindMpis(SearchPath());
    if (FLAGS_mpirun.empty() && FLAGS_mpicxx.empty()) return;
    mpis_ = {{"mpi", FLAGS_mpirun.empty() ? "mpirun" : FLAGS_mpirun,
              FLAGS_mpicxx.empty() ? "mpicxx" : FLAGS_mpicxx}};
  }

  std::vector<std::string> WhatIsThere() const {
    std::vector<std::string> names = {"local", "shm", "tcp", "raw_gloo"};
    for (const Mpi& mpi : mpis_) names.push_back(mpi.name);
    if (mpis_.empty()) names.push_back("mpi");  // Which then says why it is left out.
    names.push_back("memcpy");
    return names;
  }

  Mpi MpiOf(const std::string& backend) const {
    for (const std::vector<Mpi>& mpis : {mpis_, KnownMpis()}) {
      for (const Mpi& mpi : mpis) {
        if (mpi.name == backend) return mpi;
      }
    }
    return {};
  }

  absl::Status Start(const std::string& backend) {
    const std::string folder = absl::StrCat(folder_->path(), "/", backend);
    if (mkdir(folder.c_str(), 0700) != 0) return absl::ErrnoToStatus(errno, folder);
    RankOptions options{.name = backend, .world = FLAGS_world, .folder = folder};
    const Mpi mpi = MpiOf(backend);
    if (mpi.name.empty()) {
      options.programs = OwnPrograms(backend, folder);
    } else {
      const absl::StatusOr<Program> program = Prepare(mpi, folder);
      if (!program.ok()) {
        std::cout << backend << " is not measured: " << program.status().message() << std::endl;
        return absl::OkStatus();
      }
      options.programs = {*program};
    }
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Peer> peer, StartRanks(options));
    peers_.push_back(std::move(peer));
    if (!mpi.name.empty() || backend == "raw_gloo") bases_.push_back(backend);
    return absl::OkStatus();
  }

  static absl::StatusOr<Program> Prepare(const Mpi& mpi, const std::string& folder) {
    EK_RETURN_IF_ERROR(CheckThere(mpi, SearchPath()));
    EK_ASSIGN_OR_RETURN(const std::string binary, CompileMpiRank(mpi, folder));
    return MpiProgram(mpi, binary, FLAGS_world, folder, FLAGS_mpi_args);
  }

  absl::Status Measure() {
    std::vector<Contender> contenders;
    for (const auto& peer : peers_) {
      contenders.push_back({peer.get()});
      if (std::find(registered_.begin(), registered_.end(), peer->name()) != registered_.end()) {
        contenders.push_back({peer.get(), /*registered=*/true});
      }
    }
    SweepOptions options{.world = FLAGS_world,
                         .scalar = scalar_,
                         .block_time = absl::Seconds(FLAGS_min_time),
                         .pairs = FLAGS_pairs,
                         .time_limit = absl::Seconds(FLAGS_time_limit),
                         .bases = bases_,
                         .memory = AvailableMemory() / 2};
    std::cout << FLAGS_world << " ranks, " << FLAGS_dtype << ", "
              << std::thread::hardware_concurrency() << " processors\n";
    std::string title;  // A headline for each collective.
    const auto on_cell = [&](std::span<const Row> rows) {
      if (rows.empty()) return;
      if (title != NameOf(rows[0].what.op)) std::cout << "\n" << Headline();
      title = NameOf(rows[0].what.op);
      for (const Row& row : rows) std::cout << TextOf(row);
      std::cout << std::flush;
    };
    const auto on_left_out = [](const std::string& sentence) {
      std::cout << "left out: " << sentence << std::endl;
    };
    EK_ASSIGN_OR_RETURN(const std::vector<Row> rows,
                        RunSweep(contenders, CellsOf(ops_, sizes_, loop_sizes_), options,
                                 {.on_cell = on_cell, .on_left_out = on_left_out}));
    if (!bases_.empty()) {
      std::cout
          << "\nTimes over those of " << absl::StrJoin(bases_, ", ")
          << ": medians of the ratios of blocks in the same round, with their 95 % intervals\n\n"
          << RatioTable(rows, bases_);
    }
    if (FLAGS_json.empty()) return absl::OkStatus();
    json_ << JsonOf(rows);
    json_.close();
    return json_ ? absl::OkStatus()
                 : absl::UnavailableError(absl::StrCat("cannot write ", FLAGS_json));
  }

  // Returns the memory that the system could give without swapping; unbounded if unknown.
  static int64_t AvailableMemory() {
    std::ifstream file("/proc/meminfo");
    for (std::string name, line; file >> name && std::getline(file, line);) {
      int64_t kib = 0;
      if (name == "MemAvailable:" && absl::SimpleAtoi(line.substr(0, line.find('k')), &kib))
        return kib * 1024;
    }
    return INT64_MAX;
  }

  std::vector<std::string> backends_, registered_, bases_;
  std::vector<Mpi> mpis_;
  std::vector<Op> ops_;
  std::vector<int64_t> sizes_, loop_sizes_;
  Scalar scalar_ = Scalar::kFloat32;
  std::ofstream json_;
  std::unique_ptr<TemporaryFolder> folder_;
  std::vector<std::unique_ptr<Peer>> peers_;  // Before the folder they go.
};

absl::StatusOr<int> Main(int argc, char** argv) {
  if (argc == 5 && absl::string_view(argv[1]) == kAsRank) {
    int ranks = 0;
    if (absl::SimpleAtoi(argv[4], &ranks)) return RunAsRank(argv[2], argv[3], ranks);
    return absl::InvalidArgumentError("the number of ranks is not a number");
  }
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument != "--help" && argument != "-help" && argument != "-h") continue;
    std::cout << kUsage << "\nFlags:\n";
    std::vector<gflags::CommandLineFlagInfo> flags;
    gflags::GetAllFlags(&flags);
    for (const gflags::CommandLineFlagInfo& flag : flags) {
      if (!absl::EndsWith(flag.filename, "bench_collectives.cc")) continue;
      std::cout << "  --" << flag.name << "=" << flag.default_value << "\n      "
                << flag.description << "\n";
    }
    return EXIT_SUCCESS;
  }
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  EK_RETURN_IF_ERROR(Bench().Run());
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel::bench

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::bench::Main(argc, argv); });
}
