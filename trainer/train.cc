// Trains a model with several ranks, on the CPU or on GPUs: see --help.
//
//   no torchrun, Slurm or MPI around   check everything -> start --nproc processes of this program (or threads)
//   one of them around                 be one rank: join the group -> agree that all is well -> train
//
// The process that starts the others runs no kernel, so that it forks before OpenMP has threads, and asks a child of its
// own for the number of GPUs. It has checked flags, files and data, so that a mistake is told once, and nothing has been
// started.

#include <gflags/gflags.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/flight_signal.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/flight_folder.h"
#include "evenkeel/tools/launcher.h"
#include "evenkeel/trainer/checkpoint/checkpoint_options.h"
#include "evenkeel/trainer/checkpoint/stop_signals.h"
#include "evenkeel/trainer/choose_device.h"
#include "evenkeel/trainer/compute_threads.h"
#include "evenkeel/trainer/device/cuda_devices.h"
#include "evenkeel/trainer/flag_help.h"
#include "evenkeel/trainer/rank_setup.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/train_rank.h"
#include "evenkeel/trainer/training_data.h"
#include "evenkeel/trainer/usable_cores.h"

namespace {
const evenkeel::TrainFlags kDefaults;
}  // namespace

DEFINE_string(model, kDefaults.model, "=M mlp (784-hidden-10), cnn (a small ResNet with batch norm) or gpt (GPT-2)");
DEFINE_string(hidden, evenkeel::kDefaultHidden, "=N,N,... hidden units of the mlp, layer by layer");
DEFINE_string(preset, "mini", "=P sizes of the gpt: tiny, mini or gpt2; the next four change single ones");
DEFINE_int64(layers, 0, "of the gpt (default: the preset's)");
DEFINE_int64(width, 0, "of the gpt's residual stream (default: the preset's)");
DEFINE_int64(heads, 0, "of each of the gpt's attentions (default: the preset's)");
DEFINE_int64(context, 0, "tokens that the gpt sees (default: the preset's)");
DEFINE_double(dropout, 0, "of the gpt (default: the preset's)");
DEFINE_double(
    loss_scale, kDefaults.loss_scale,
    "with --compute=float16: by what a loss is multiplied at first; halved when gradients overflow, and such a "
    "step is left out; doubled after 2000 steps in which none did");
DEFINE_string(compute, kDefaults.compute,
              "=T float32 or bfloat16, of the factors of matrix products, on the CPU for the gpt only; on GPUs also "
              "float16, of mlp and cnn; float64, of everything in the mlp, on the CPU");
DEFINE_string(widths, "16,32,64", "=N,N,... channels of the cnn's stem and stages");
DEFINE_int32(blocks, 1, "residual blocks of each stage of the cnn");
DEFINE_string(init, kDefaults.init, "=FILE start from these weights (safetensors)");
DEFINE_string(save, kDefaults.save, "=FILE write the trained weights there (safetensors)");

DEFINE_string(
    data, "",
    "=PATH folder with MNIST-style IDX files or with CIFAR-10's, a text, or token shards as llm.c writes them "
    "(a pattern like 'fine_train_*.bin') (default: Fashion-MNIST, for gpt The Jargon File, as Debian has them)");
DEFINE_string(test_data, kDefaults.test_data, "=PATTERN token shards to test with (default: val for train in --data)");
DEFINE_bool(mirror, false,
            "half of the training images are mirrored, others in each epoch (default: on for cnn on Fashion-MNIST)");
DEFINE_int32(shift, 0, "training images are moved by up to so many pixels (default: 0, for cnn on Fashion-MNIST 1)");
DEFINE_bool(shuffle, kDefaults.shuffle, "another order of the samples in each epoch");
DEFINE_uint64(seed, kDefaults.seed, "of the first weights and the shuffling");
DEFINE_int64(batch_size, 96, "samples per rank and pass (default: cnn 32, gpt 8, mlp 96)");
DEFINE_int64(accumulate, kDefaults.accumulate, "passes per step, whose gradients add up");
DEFINE_int32(epochs, 4, "times that all the data is seen (default: cnn 8, gpt 6, mlp 4)");
DEFINE_int64(max_steps, kDefaults.max_steps, "end after so many steps of the group; 0 is no limit");
DEFINE_string(rank_steps, kDefaults.rank_steps,
              "=N,N,... batches of each rank per epoch, uneven on purpose (default: all the data)");

DEFINE_string(optimizer, kDefaults.optimizer, "=O sgd, adam or adamw");
DEFINE_double(lr, 0, "learning rate (default: adam and adamw 0.003, for mlp 0.001; sgd 0.1)");
DEFINE_string(lr_decay, kDefaults.lr_decay,
              "=D none, linear (to 0 at the end), cosine (to a tenth), or by default auto: cosine for gpt, linear for "
              "cnn, else none");
DEFINE_int64(warmup, 0, "first steps, in which the learning rate grows (default: 0 for mlp, else 100)");
DEFINE_double(momentum, kDefaults.momentum, "of sgd");
DEFINE_double(weight_decay, 0,
              "decoupled for adamw, else L2; of matrices only for gpt (default: adamw 0.05 for cnn, 0.1 for gpt, 0.01 "
              "for mlp; else 0)");
DEFINE_double(clip, 0, "largest norm of all gradients together; 0 is any (default: 1 for gpt, else 0)");
DEFINE_bool(zero, kDefaults.zero, "spread the optimizer's state over the ranks");
DEFINE_string(shards, kDefaults.shards,
              "=S with --zero, in equal slices, which gradients are reduced to, or in whole tensors");

DEFINE_string(device, kDefaults.device,
              "=D cpu, cuda (a GPU for each rank), or auto: cuda if there are as many GPUs as ranks");
DEFINE_int32(nproc, evenkeel::kDefaultRanks,
             "ranks to start on this host; leave it out under torchrun, Slurm or MPI (default: as many as GPUs, on the "
             "CPU 2)");
DEFINE_string(backend, kDefaults.backend,
              "=B shm (processes of one host), gloo (TCP), hierarchical (both), local (threads), nccl (GPUs), or auto: "
              "what fits");
DEFINE_bool(join, kDefaults.join, "ranks that run out of batches go on with the others");
DEFINE_string(
    divide_by, "samples",
    "=D gradients are divided by the samples of the step, so that each weighs the same, by the initial number "
    "of ranks, or by the effective one: those with a batch");
DEFINE_bool(stop_early, kDefaults.stop_early, "all ranks stop when the first has run out, then evaluate and save");

DEFINE_string(on_failure, kDefaults.on_failure,
              "=F stop, or continue: when a rank is lost, the others go on with what is left of the epoch; continue "
              "needs --nozero or --lost_shard=fresh");
DEFINE_string(lost_shard, kDefaults.lost_shard,
              "=P with --zero, the lost rank's part of the optimizer's state: refuse to begin with "
              "--on_failure=continue, or begin that part fresh");
DEFINE_string(verify, kDefaults.verify,
              "=V ranks compare their collectives: off, positions or every (default: EVENKEEL_VERIFY, else positions)");

DEFINE_double(bucket_cap_mb, kDefaults.bucket_cap_mb, "size of gradient buckets; 0 is a bucket per parameter");
DEFINE_double(first_bucket_mb, kDefaults.first_bucket_mb, "size of the first one: smaller, so that it leaves early");
DEFINE_bool(grad_view, kDefaults.grad_view, "gradients lie in the buckets: no copies");
DEFINE_string(auto_refresh_trainable, kDefaults.auto_refresh_trainable,
              "=W always, never or N: look for frozen parameters in each, no or every N-th step");
DEFINE_string(freeze, kDefaults.freeze, "=P@A:B,... freeze parameters whose name begins with P from step A until B");

DEFINE_string(
    checkpoint_dir, kDefaults.checkpoint_dir,
    "=DIR write checkpoints there; SIGTERM and SIGINT have the run save one and end with 128 + signal (without "
    "checkpoints it writes --save, --report and --trace)");
DEFINE_int64(checkpoint_every, evenkeel::kDefaultCheckpointEvery,
             "steps between them; 0: only when the run is told to stop, and at its end");
DEFINE_int32(keep, evenkeel::CheckpointOptions().keep, "how many of the newest stay; 0: all");
DEFINE_string(resume, evenkeel::kResumeAuto,
              "=R auto (from the newest in --checkpoint_dir, if there is one), never, or a checkpoint's path");

DEFINE_string(metrics, kDefaults.metrics, "=FILE write JSON lines: every step, epoch and the end");
DEFINE_string(tensorboard, kDefaults.tensorboard, "=DIR add an event file there, for tensorboard --logdir");
DEFINE_string(prometheus, kDefaults.prometheus,
              "=FILE.prom write the state of the run there every 5 s, for node_exporter");
DEFINE_string(
    report, kDefaults.report,
    "=FILE.html write there what the run was: curves, steps rank by rank, buckets, memory; one file, no network");
DEFINE_string(trace, kDefaults.trace,
              "=FILE.json write some of its steps as a trace that ui.perfetto.dev and chrome://tracing open");
DEFINE_bool(dry_run, kDefaults.dry_run,
            "a few steps only, nothing is written: what buckets, memory and time the run would take");
DEFINE_string(flight, kDefaults.flight,
              "=DIR each rank writes its last collectives there when the run fails, or on SIGUSR1 and goes on "
              "(default: EVENKEEL_FLIGHT, else none)");

namespace evenkeel {
namespace {

const FlagGroup kFlagGroups[] = {
    {"Model",
     {"model", "hidden", "preset", "layers", "width", "heads", "context", "dropout", "compute", "loss_scale", "widths",
      "blocks", "init", "save"}},
    {"Data",
     {"data", "test_data", "mirror", "shift", "shuffle", "seed", "batch_size", "accumulate", "epochs", "max_steps",
      "rank_steps"}},
    {"Optimizer", {"optimizer", "lr", "lr_decay", "warmup", "momentum", "weight_decay", "clip", "zero", "shards"}},
    {"Ranks", {"device", "nproc", "backend", "join", "divide_by", "stop_early", "on_failure", "lost_shard", "verify"}},
    {"Gradients", {"bucket_cap_mb", "first_bucket_mb", "grad_view", "auto_refresh_trainable", "freeze"}},
    {"Checkpoints", {"checkpoint_dir", "checkpoint_every", "keep", "resume"}},
    {"Output", {"dry_run", "metrics", "report", "trace", "tensorboard", "prometheus", "flight"}},
};

const TrainStreams kStreams{.out = stdout, .log = stderr};

constexpr char kSummary[] = R"(Trains a model on images or text with several ranks.

  bazel run //trainer:train
  bazel run //trainer:train -- --model=gpt
  bazel run //trainer:train -- --model=mlp --nproc=4 --epochs=1
  bazel run //trainer:train -- --model=mlp --rank_steps=3,5 --divide_by=effective --save=mlp.safetensors
  bazel run //trainer:train -- --model=mlp --freeze=fc1@100:200 --metrics=run.jsonl
  bazel run //trainer:train -- --model=mlp --nproc=4 --nozero --on_failure=continue
  torchrun --no_python --nproc_per_node=2 train --model=cnn

The last line of the output is test_accuracy=0.xxxx, of a text test_bits_per_byte=x.xxxx. Relative paths mean the folder
you are in.

)";

bool IsSet(const char* flag) {
  std::string value;
  return gflags::GetCommandLineOption(flag, &value) && value == "true";
}

// Help, for whatever spelling of it gflags knows.
bool WantsHelp() {
  for (const char* name : {"help", "helpfull", "helpshort", "helppackage", "helpxml"}) {
    if (IsSet(name)) return true;
  }
  return false;
}

template <typename Value>
std::optional<Value> IfGiven(const char* name, Value value) {
  return gflags::GetCommandLineFlagInfoOrDie(name).is_default ? std::nullopt : std::optional<Value>(value);
}

TrainFlags FlagsAsGiven() {
  return {
      .model = FLAGS_model,
      .hidden = IfGiven("hidden", FLAGS_hidden),
      .preset = IfGiven("preset", FLAGS_preset),
      .layers = IfGiven("layers", FLAGS_layers),
      .width = IfGiven("width", FLAGS_width),
      .heads = IfGiven("heads", FLAGS_heads),
      .context = IfGiven("context", FLAGS_context),
      .dropout = IfGiven("dropout", FLAGS_dropout),
      .compute = FLAGS_compute,
      .loss_scale = FLAGS_loss_scale,
      .widths = IfGiven("widths", FLAGS_widths),
      .blocks = IfGiven("blocks", FLAGS_blocks),
      .data = IfGiven("data", FLAGS_data),
      .test_data = FLAGS_test_data,
      .mirror = IfGiven("mirror", FLAGS_mirror),
      .shift = IfGiven("shift", FLAGS_shift),
      .shuffle = FLAGS_shuffle,
      .seed = FLAGS_seed,
      .device = FLAGS_device,
      .nproc = IfGiven("nproc", FLAGS_nproc),
      .backend = FLAGS_backend,
      .epochs = IfGiven("epochs", FLAGS_epochs),
      .max_steps = FLAGS_max_steps,
      .batch_size = IfGiven("batch_size", FLAGS_batch_size),
      .accumulate = FLAGS_accumulate,
      .rank_steps = FLAGS_rank_steps,
      .optimizer = FLAGS_optimizer,
      .lr = IfGiven("lr", FLAGS_lr),
      .lr_decay = FLAGS_lr_decay,
      .warmup = IfGiven("warmup", FLAGS_warmup),
      .momentum = FLAGS_momentum,
      .weight_decay = IfGiven("weight_decay", FLAGS_weight_decay),
      .clip = IfGiven("clip", FLAGS_clip),
      .zero = FLAGS_zero,
      .shards = FLAGS_shards,
      .join = FLAGS_join,
      .divide_by = IfGiven("divide_by", FLAGS_divide_by),
      .stop_early = FLAGS_stop_early,
      .on_failure = FLAGS_on_failure,
      .lost_shard = FLAGS_lost_shard,
      .verify = FLAGS_verify,
      .bucket_cap_mb = FLAGS_bucket_cap_mb,
      .first_bucket_mb = FLAGS_first_bucket_mb,
      .grad_view = FLAGS_grad_view,
      .auto_refresh_trainable = FLAGS_auto_refresh_trainable,
      .freeze = FLAGS_freeze,
      .init = FLAGS_init,
      .save = FLAGS_save,
      .checkpoint_dir = FLAGS_checkpoint_dir,
      .checkpoint_every = IfGiven("checkpoint_every", FLAGS_checkpoint_every),
      .keep = IfGiven("keep", FLAGS_keep),
      .resume = IfGiven("resume", FLAGS_resume),
      .metrics = FLAGS_metrics,
      .tensorboard = FLAGS_tensorboard,
      .prometheus = FLAGS_prometheus,
      .dry_run = FLAGS_dry_run,
      .flight = FLAGS_flight,
      .report = FLAGS_report,
      .trace = FLAGS_trace,
  };
}

int Fail(absl::string_view sentence) {
  std::cerr << absl::StrCat("train: ", sentence, "\n");  // One write, so that ranks do not mix their lines.
  return EXIT_FAILURE;
}

int ExitCode(const absl::Status& status) { return status.ok() ? EXIT_SUCCESS : Fail(status.message()); }

// An equal share of the cores, unless the user has set the number.
std::optional<int> ThreadsPerRank(int ranks_on_host) {
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return std::nullopt;
  return std::max(1, UsableCores() / ranks_on_host);
}

absl::string_view NameOf(BackendKind backend) {
  switch (backend) {
    case BackendKind::kAuto:
      return "auto";
    case BackendKind::kLocal:
      return "local";
    case BackendKind::kShm:
      return "shm";
    case BackendKind::kGloo:
      return "gloo";
    case BackendKind::kHierarchical:
      return "hierarchical";
    case BackendKind::kNccl:
      return "nccl";
  }
  return "auto";
}

// What is wrong before anything has been started.
absl::Status CheckSetup(const TrainOptions& options) {
  return PrepareRank(options, LoadTrainingData(options.data), /*rank=*/0, options.nproc).status();
}

// Where a person asks for flight records, they can have them of a run that hangs, too.
absl::Status DumpFlightIfAsked(const TrainOptions& options) {
  if (options.flight_folder.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(DumpFlightOnSignal(SIGUSR1, options.flight_folder));
  // The thread that dumps takes it, and none that computes (stop_signals.cc says why).
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return absl::OkStatus();
}

CommunicatorOptions GroupOptions(const TrainOptions& options) {
  CommunicatorOptions group;
  group.verify = options.verify;
  group.flight.folder = options.flight_folder;
  return group;
}

// Where there is something to write, a checkpoint or a file that is due at the end. Else, and until all ranks are
// there, SIGTERM and SIGINT do as they always do.
bool SavesWhenStopped(const TrainOptions& options) {
  const bool has_files = !options.checkpoints.folder.empty() || !options.save_file.empty() || options.wants_record();
  return has_files && !options.dry_run;
}

// A signal may have come to another rank alone.
int StoppedExitCode() { return 128 + (StopSignal() == 0 ? SIGTERM : StopSignal()); }

// All ranks are threads.
int RunThreads(const TrainOptions& options) {
  const auto data = LoadTrainingData(options.data);
  absl::Status status = PrepareRank(options, data, /*rank=*/0, options.nproc).status();
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

// By its name argv[0] this program may be another one: it may have been found through PATH, or from another folder.
std::string OwnPath() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "/proc/self/exe" : path.string();
}

// All ranks are processes that run this program with the same arguments.
int RunProcesses(const TrainOptions& options, std::vector<std::string> arguments) {
  if (const absl::Status status = CheckSetup(options); !status.ok()) return ExitCode(status);
  arguments[0] = OwnPath();
  LaunchOptions launch{.ranks = options.nproc, .command = std::move(arguments)};
  if (const auto threads = ThreadsPerRank(options.nproc)) {
    launch.variables["OMP_NUM_THREADS"] = absl::StrCat(*threads);
  }
  if (options.goes_on) launch.on_failure = OnFailure::kContinue;
  const absl::StatusOr<LaunchResult> result = Launch(launch);
  if (!result.ok()) return ExitCode(result.status());
  // Who ends with EXIT_FAILURE has said why, and so have ranks that ended because they were asked to.
  const bool was_stopped = SavesWhenStopped(options) && !absl::StrContains(result->message, "was killed") &&
                           (result->exit_code == 128 + SIGTERM || result->exit_code == 128 + SIGINT);
  const bool was_said = was_stopped || (result->exit_code == EXIT_FAILURE && !options.goes_on);
  if (!result->message.empty() && !was_said) Fail(result->message);
  return result->exit_code;
}

// This process is one rank.
int RunRank(const TrainOptions& options, const Environment& environment) {
  const std::string name = environment.world_size == 1 ? "" : absl::StrCat("rank ", environment.rank, ": ");
  const auto fail = [&](const absl::Status& status) { return Fail(absl::StrCat(name, status.message())); };
  if (environment.is_one_host) {
    if (const auto threads = ThreadsPerRank(environment.world_size)) SetComputeThreads(*threads);
  }
  if (SavesWhenStopped(options)) WatchStopSignals();
  if (const absl::Status status = DumpFlightIfAsked(options); !status.ok()) return fail(status);
  const auto comm = CreateCommunicator(
      environment, {.backend = std::string(NameOf(options.backend)), .communicator = GroupOptions(options)});
  if (!comm.ok()) return fail(comm.status());
  DeferStopSignals();  // A run that has not begun has nothing to save, and waits long for a rank that is missing.
  TrainResult result = TrainRank(**comm, options, LoadTrainingData(options.data), kStreams);
  // With goes_on it has left its last group.
  if (result.status.ok() && !options.goes_on) result.status = (*comm)->Finalize();
  if (result.status.ok()) return result.was_stopped ? StoppedExitCode() : EXIT_SUCCESS;

  if (options.goes_on && environment.rank_zero_hosts && absl::IsUnavailable(result.status)) {
    result.status = absl::UnavailableError(absl::StrCat(
        result.status.message(), "; where tools:launch or --nproc starts the ranks, no rank takes the store with it"));
  }
  // Before the others can end: some launchers (MPICH's) kill the rest at once when the first rank has failed.
  if (result.reports) result.is_common ? Fail(result.status.message()) : fail(result.status);
  if (result.is_common) {
    (*comm)->Finalize().IgnoreError();  // What is wrong is known.
  } else if (!options.goes_on) {
    (*comm)->Abort(result.status);
  }
  return EXIT_FAILURE;
}

// CPU or GPUs, and how many ranks.
absl::Status Choose(const Environment& environment, TrainOptions& options) {
  std::optional<int> ranks_here;
  if (!environment.launcher.empty()) ranks_here = environment.world_size;
  // Of several hosts nobody knows here how many ranks and GPUs the others have.
  if (ranks_here.has_value() && !environment.is_one_host) {
    if (options.device == DeviceKind::kAuto && options.backend == BackendKind::kAuto) {
      options.device = DeviceKind::kCpu;
    }
    ranks_here = environment.local_rank + 1;
  }
  const absl::StatusOr<int> devices = AsksForDevices(options) ? CountCudaDevices() : 0;
  EK_ASSIGN_OR_RETURN(const std::string line, ChooseDevice(devices, ranks_here, options));
  if (!line.empty() && environment.rank == 0) {
    absl::FPrintF(kStreams.log, "train: %s\n", line);
  }
  return absl::OkStatus();
}

int Main(std::vector<std::string> arguments) {
  absl::StatusOr<TrainOptions> options = MakeTrainOptions(FlagsAsGiven());
  if (!options.ok()) return ExitCode(options.status());
  const absl::StatusOr<Environment> environment = ReadEnvironment();
  if (!environment.ok()) return ExitCode(environment.status());
  const bool is_rank = !environment->launcher.empty();
  if (!is_rank && !options->flight_folder.empty()) {
    const absl::Status status = PrepareFlightFolder(options->flight_folder).status();
    if (!status.ok()) return Fail(absl::StrCat("--flight=", status.message()));
  }
  // What a flag says comes before what the environment says.
  if (!options->verify.has_value()) options->verify = environment->verify;
  if (options->flight_folder.empty()) options->flight_folder = environment->flight_folder;
  if (const auto nproc = IfGiven("nproc", FLAGS_nproc);
      is_rank && nproc.has_value() && *nproc != environment->world_size) {
    return Fail(absl::StrCat("rank ", environment->rank, ": --nproc=", *nproc,
                             " is for a program that starts its own ranks; this one is one of ",
                             environment->world_size, " that are there already"));
  }
  if (const absl::Status status = Choose(*environment, *options); !status.ok()) {
    return Fail(is_rank ? absl::StrCat("rank ", environment->rank, ": ", status.message()) : status.message());
  }
  if (!is_rank && options->backend == BackendKind::kLocal) return RunThreads(*options);
  if (!is_rank && options->nproc > 1) return RunProcesses(*options, std::move(arguments));

  return RunRank(*options, *environment);
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  // A pipe without a reader is an output that can't be written, as on a full disk, and must not kill the run: --metrics
  // reports it once, and without a standard output the run ends with an error (run_report.h).
  signal(SIGPIPE, SIG_IGN);
  std::vector<std::string> arguments(argv, argv + argc);
  // Under `bazel run` this is where the user is.
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY"); folder != nullptr && chdir(folder) != 0) {
    return evenkeel::ExitCode(absl::ErrnoToStatus(errno, absl::StrCat("cannot go to ", folder)));
  }
  gflags::ParseCommandLineNonHelpFlags(&argc, &argv, /*remove_flags=*/true);
  if (evenkeel::WantsHelp()) {
    std::cout << evenkeel::kSummary << evenkeel::FlagHelp(evenkeel::kFlagGroups);
    return EXIT_SUCCESS;
  }
  if (evenkeel::IsSet("version")) return evenkeel::Fail("--version is no flag; see --help");
  if (argc > 1) return evenkeel::Fail(absl::StrCat("\"", argv[1], "\" is no flag; see --help"));
  try {
    return evenkeel::Main(std::move(arguments));
  } catch (const std::exception& error) {  // Out of memory, before any rank runs that could report it.
    return evenkeel::Fail(absl::StrCat("exception: ", error.what()));
  }
}
