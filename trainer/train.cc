// Trains a model with several ranks, on the CPU or on GPUs: see --help.
//
//   without torchrun, Slurm or MPI   check flags and files -> start --nproc processes of this
//                                    program (or threads)
//   under one of them                be one rank: join the group -> agree that all ranks are ready
//                                    -> train
//
// The process that starts the others runs no kernel, so that it forks before OpenMP has threads,
// and uses a child process to count the GPUs. It checks flags, files and the sizes of the data
// first, so that an error is reported once, before any rank is started. The ranks agree on what
// else they find: damaged images, too little memory.

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/replica_check.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/flight_signal.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/launch/flight_folder.h"
#include "evenkeel/launch/launcher.h"
#include "evenkeel/trainer/app/choose_device.h"
#include "evenkeel/trainer/app/flag_table.h"
#include "evenkeel/trainer/app/memory_plan.h"
#include "evenkeel/trainer/app/memory_reserve.h"
#include "evenkeel/trainer/app/progress.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/train_rank.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/checkpoint/stop_signals.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/device/cuda_devices.h"
#include "evenkeel/trainer/layers/compute_threads.h"

namespace evenkeel {
namespace {

const TrainStreams kStreams{.out = stdout, .log = stderr};

constexpr char kSummary[] = R"(Trains a model on images or text with several ranks.

  $0
  $0 --model=gpt
  $0 --model=mlp --nproc=4 --epochs=1
  $0 --model=mlp --rank_steps=3,5 --divide_by=effective --save=mlp.safetensors
  $0 --model=mlp --freeze=fc1@100:200 --metrics=run.jsonl
  $0 --model=mlp --nproc=4 --nozero --on_failure=continue
  torchrun --no_python --nproc_per_node=2 $0 --model=cnn

The last line of the output is test_accuracy=0.xxxx, for a text test_bits_per_byte=x.xxxx.
Relative paths refer to the current folder.

)";

int Fail(absl::string_view sentence) {
  // One write, so that ranks do not mix their lines.
  std::cerr << absl::StrCat(BeginLine(stderr), program_invocation_short_name, ": ", sentence, "\n");
  return EXIT_FAILURE;
}

int ExitCode(const absl::Status& status) {
  return status.ok() ? EXIT_SUCCESS : Fail(status.message());
}

// GNU's OpenMP, on which oneDNN's kernels run, spins for milliseconds where its threads wait for
// each other. Beside other programs the awaited thread is often not running. OpenMP reads its
// environment once, when it is loaded, so the program starts again in this process, and its child
// processes inherit the variable. If it cannot be started, it goes on.
void LimitSpinning(char** argv) {
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (threads != nullptr && absl::string_view(threads) == "1") return;
  for (const char* const name : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}) {
    if (std::getenv(name) != nullptr) return;
  }
  constexpr char kSpins[] = "1000";  // Tens of microseconds.
  if (setenv("GOMP_SPINCOUNT", kSpins, /*overwrite=*/1) == 0) execv(OwnPath().c_str(), argv);
}

// Returns an equal share of the cores, unless the user has set the number.
std::optional<int> ThreadsPerRank(int ranks_on_host) {
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return std::nullopt;
  return std::max(1, UsableCores() / ranks_on_host);
}

// Prints the memory that the run needs, without starting ranks.
absl::Status RunDry(const TrainOptions& options, const Environment& environment) {
  const bool is_rank = !environment.launcher.empty();
  const int world_size = is_rank ? environment.world_size : options.nproc;
  if (environment.rank != 0) return absl::OkStatus();
  const bool is_cuda = options.device == DeviceKind::kCuda;
  // Measured before this process loads the data, which counts as a part of the run's memory.
  const MemoryPlace place =
      is_cuda ? DeviceMemory(Device::Cuda(0), FactsOfCudaDevice(0)) : HostMemory();
  // Ranks on GPUs have one each; the numbers of ranks on other hosts are unknown.
  const int ranks = is_cuda || !environment.is_one_host ? 1 : world_size;
  EK_ASSIGN_OR_RETURN(const auto data, LoadTrainingData(options.data));
  EK_ASSIGN_OR_RETURN(const std::string text,
                      DescribeDryRun(options, data, world_size, ranks, place));
  absl::FPrintF(kStreams.out, "%s", text);
  return absl::OkStatus();
}

// With --flight, SIGUSR1 writes flight records of a run that hangs, too.
absl::Status DumpFlightIfAsked(const TrainOptions& options) {
  return options.flags.flight.empty() ? absl::OkStatus()
                                      : DumpFlightOnSignal(SIGUSR1, options.flags.flight);
}

CommunicatorOptions GroupOptions(const TrainOptions& options) {
  CommunicatorOptions group;
  group.verify = options.verify;
  group.flight.folder = options.flags.flight;
  return group;
}

// True if the run has something to write when it is stopped: a checkpoint, or a file that is due at
// the end. Otherwise, and until all ranks are there, SIGTERM and SIGINT end the process.
bool SavesWhenStopped(const TrainOptions& options) {
  return !options.checkpoints.folder.empty() || !options.flags.save.empty() ||
         options.wants_record();
}

// The signal may have been sent to another rank only.
int StoppedExitCode() { return 128 + (StopSignal() == 0 ? SIGTERM : StopSignal()); }

// All ranks are threads.
int RunThreads(const TrainOptions& options) {
  const MemoryPlace place = HostMemory();
  const auto data = LoadTrainingData(options.data);
  absl::Status status = data.status();
  if (status.ok())
    status = DescribeDryRun(options, *data, options.nproc, options.nproc, place).status();
  if (!status.ok()) return ExitCode(status);
  if (SavesWhenStopped(options)) {
    WatchStopSignals();
    DeferStopSignals();  // No rank is waited for.
  }
  if (status = DumpFlightIfAsked(options); !status.ok()) return ExitCode(status);
  std::atomic<bool> was_stopped = false;
  status = RunRanks(
      options.nproc,
      [&](Communicator& comm) {
        if (const auto threads = ThreadsPerRank(options.nproc)) SetComputeThreads(*threads);
        const TrainResult result = TrainRank(comm, options, data, kStreams);
        if (result.was_stopped) was_stopped = true;
        return result.status;
      },
      GroupOptions(options));
  return status.ok() && was_stopped ? StoppedExitCode() : ExitCode(status);
}

// All ranks are processes that run this program with the same arguments.
int RunProcesses(const TrainOptions& options, std::vector<std::string> arguments) {
  const auto data = LoadTrainingData(options.data, Contents::kSizes);
  const absl::Status status = CheckRank(options, data, /*rank=*/0, options.nproc).status();
  if (!status.ok()) return ExitCode(status);
  arguments[0] = OwnPath();
  LaunchOptions launch{.ranks = options.nproc, .command = std::move(arguments)};
  if (const auto threads = ThreadsPerRank(options.nproc)) {
    launch.variables["OMP_NUM_THREADS"] = absl::StrCat(*threads);
  }
  if (options.goes_on)
    launch.on_failure = options.replaces ? OnFailure::kReplace : OnFailure::kContinue;
  const absl::StatusOr<LaunchResult> result = Launch(launch);
  if (!result.ok()) return ExitCode(result.status());
  // Ranks that end with EXIT_FAILURE have reported the reason, and so have ranks that were told to
  // stop.
  const bool was_stopped =
      SavesWhenStopped(options) && !result->by_signal &&
      (result->exit_code == 128 + SIGTERM || result->exit_code == 128 + SIGINT);
  const bool was_said =
      was_stopped || (result->exit_code == EXIT_FAILURE && !result->by_signal && !options.goes_on);
  if (!result->message.empty() && !was_said) Fail(result->message);
  return result->exit_code;
}

// This process is one rank.
int RunRank(const TrainOptions& options, const Environment& environment) {
  const std::string name =
      environment.world_size == 1 ? "" : absl::StrCat("rank ", environment.rank, ": ");
  const auto fail = [&](const absl::Status& status) {
    return Fail(
        absl::StrCat(absl::StartsWith(status.message(), name) ? "" : name, status.message()));
  };
  if (environment.newcomer > 0 && !options.replaces) {
    return Fail(absl::StrCat(name,
                             "EVENKEEL_NEWCOMER is set, and a lost rank is not replaced: pass "
                             "--on_failure=replace"));
  }
  if (environment.is_one_host) {
    if (const auto threads = ThreadsPerRank(environment.world_size)) SetComputeThreads(*threads);
  }
  if (SavesWhenStopped(options)) WatchStopSignals();
  if (const absl::Status status = DumpFlightIfAsked(options); !status.ok()) return fail(status);
  // Unpacks images while the ranks meet; without a thread for that, afterwards.
  auto data = std::async([&] { return LoadTrainingData(options.data); });
  const auto comm = CreateCommunicator(
      environment,
      {.backend = std::string(NameOf(options.backend)), .communicator = GroupOptions(options)});
  if (!comm.ok()) return fail(comm.status());
  DeferStopSignals();  // Not earlier: a run that has not begun has nothing to save, and may
                       // wait long for a missing rank.
  TrainResult result = TrainRank(**comm, options, data.get(), kStreams);
  // With goes_on it has left its last group.
  if (result.status.ok() && !options.goes_on) result.status = (*comm)->Finalize();
  if (result.status.ok()) return result.was_stopped ? StoppedExitCode() : EXIT_SUCCESS;

  if (options.goes_on && environment.rank_zero_hosts && absl::IsUnavailable(result.status)) {
    result.status = absl::UnavailableError(absl::StrCat(
        result.status.message(),
        "; rank 0 hosted the store: start the ranks with evenkeel-launch or --nproc, which host "
        "the store, and the loss of a rank does not stop it"));
  }
  // Before the others can end: some launchers (MPICH's) kill the rest at once when the first rank
  // has failed.
  if (result.reports) result.is_common ? Fail(result.status.message()) : fail(result.status);
  if (result.is_common) {
    (*comm)->Finalize().IgnoreError();  // The error is reported already.
  } else if (!options.goes_on) {
    (*comm)->Abort(result.status);
  }
  return EXIT_FAILURE;
}

// Chooses CPU or GPUs, and the number of ranks.
absl::Status Choose(const Environment& environment, TrainOptions& options) {
  std::optional<int> local_ranks;
  if (!environment.launcher.empty()) local_ranks = environment.world_size;
  // With several hosts the numbers of ranks and GPUs of the other hosts are unknown.
  if (local_ranks.has_value() && !environment.is_one_host) {
    if (options.device == DeviceKind::kAuto && options.backend == BackendKind::kAuto) {
      options.device = DeviceKind::kCpu;
    }
    local_ranks = environment.local_rank + 1;
  }
  const CudaUse use =
      options.model == ModelKind::kCnn ? CudaUse::kProductsAndConvolutions : CudaUse::kProducts;
  const absl::StatusOr<int> devices = AsksForDevices(options) ? CountCudaDevices(use) : 0;
  EK_ASSIGN_OR_RETURN(const std::string line, ChooseDevice(devices, local_ranks, options));
  if (!line.empty() && environment.rank == 0 && environment.newcomer == 0) {
    absl::FPrintF(kStreams.log, "%s: %s\n", program_invocation_short_name, line);
  }
  return absl::OkStatus();
}

int Main(const TrainFlags& flags, std::vector<std::string> arguments) {
  absl::StatusOr<TrainOptions> options = MakeTrainOptions(flags);
  if (!options.ok()) return ExitCode(options.status());
  const absl::StatusOr<Environment> environment = ReadEnvironment();
  if (!environment.ok()) return ExitCode(environment.status());
  const bool is_rank = !environment->launcher.empty();
  if (!is_rank && !options->flags.flight.empty()) {
    const absl::Status status = PrepareFlightFolder(options->flags.flight).status();
    if (!status.ok()) return Fail(absl::StrCat("--flight=", status.message()));
  }
  options->checkpoints.passes_over_damaged = environment->restarts > 0;
  options->incarnation = environment->newcomer;
  // Flags override the environment.
  if (!options->verify.has_value()) options->verify = environment->verify;
  if (options->flags.flight.empty()) options->flags.flight = environment->flight_folder;
  ReplicaCheckOptions checks{.every = options->flags.check_replicas};
  if (const absl::Status status = Complete(checks); !status.ok()) return ExitCode(status);
  options->flags.check_replicas = checks.every;
  if (is_rank && flags.nproc.value_or(environment->world_size) != environment->world_size) {
    return Fail(absl::StrCat("rank ", environment->rank, ": --nproc=", *flags.nproc,
                             " conflicts with the ", environment->world_size,
                             " ranks of this process's launcher; leave --nproc out"));
  }
  if (const absl::Status status = Choose(*environment, *options); !status.ok()) {
    return Fail(is_rank ? absl::StrCat("rank ", environment->rank, ": ", status.message())
                        : status.message());
  }
  if (options->flags.dry_run) return ExitCode(RunDry(*options, *environment));
  if (!is_rank && options->backend == BackendKind::kLocal) return RunThreads(*options);
  if (!is_rank && options->nproc > 1) return RunProcesses(*options, std::move(arguments));

  return RunRank(*options, *environment);
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  // A pipe without a reader is an output that cannot be written, as on a full disk, and must not
  // kill the run: --metrics reports it once, and without a standard output the run ends with an
  // error (run_output.h).
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // A file at the limit of its size (ulimit -f) is a full disk, too.
  evenkeel::LimitSpinning(argv);
  evenkeel::KeepMemoryReserve();
  std::vector<std::string> arguments(argv, argv + argc);
  evenkeel::TrainFlags flags;
  evenkeel::FlagTable table;
  AddTrainFlags(table, flags);
  const absl::StatusOr<bool> runs = table.Parse(evenkeel::kSummary, argc, argv);
  if (!runs.ok() || !*runs) return evenkeel::ExitCode(runs.status());
  try {
    return evenkeel::Main(flags, std::move(arguments));
  } catch (
      const std::exception& error) {  // Out of memory, before any rank runs that could report it.
    return evenkeel::Fail(absl::StrCat("exception: ", error.what()));
  }
}
