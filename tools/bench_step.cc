// Measures what data parallelism adds to a training step, on this host: see --help.
//
//   without a launcher       starts the ranks of each backend (processes; threads of one for
//                            "local"), gathers, prints
//   under a launcher         is one of its ranks and measures; rank 0 prints, or writes for the
//                            process that has started it

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/launcher.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/tools/step/startup.h"
#include "evenkeel/tools/step/step_measurement.h"
#include "evenkeel/tools/step/step_model.h"
#include "evenkeel/tools/step/step_report.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "evenkeel/zero_optim/checkpoint/strict_json.h"
#include "gflags/gflags.h"
#include "nlohmann/json.hpp"

DEFINE_string(backends, "shm,tcp,local",
              "Of tcp and shm (ranks are processes) and local (ranks are threads of one).");
DEFINE_int32(world, 2, "Ranks that it starts.");
DEFINE_string(plans, "mlp:sgd,mlp:adamw,gpt:adamw",
              "Models (mlp: 784-1024-1024-10 with batch 64; gpt: 4 layers of width 128; tiny), "
              "each with its optimizer.");
DEFINE_bool(check_finite, true, "Also with ReducerOptions::check_finite.");
DEFINE_string(zero, "sharded,sliced", "Optimizers with their state over the ranks.");
DEFINE_string(join, "none,disabled,on", "Ways to use RunJoined().");
DEFINE_string(skew, "0,10,all",
              "Inputs, with --join=on: as many on all ranks, ten fewer on half of them, none on "
              "every eighth.");
DEFINE_int32(pairs, 30, "Blocks of each row; at least 30 for a ratio to be quoted.");
DEFINE_int32(skewed_pairs, 6, "Of rows with a skew, whose blocks are longer.");
DEFINE_int32(steps, 0, "Of a block; 0: 8, and 3 of gpt.");
DEFINE_bool(views, true, "Gradients lie in the buckets; false: they are copied.");
DEFINE_string(caps_kb, "",
              "Caps of the buckets in KiB, the last one for all others; empty: the default.");
DEFINE_int32(startups, 10,
             "How many times //trainer:train is started, to its first finished step; 0: not.");
DEFINE_string(trainer, "", "That program; empty: the one that was built beside this one.");
DEFINE_string(data_dir, "", "Its data; empty: its default.");
DEFINE_string(json, "", "Everything, as JSON, into this file.");
DEFINE_string(report, "", "For the ranks that it starts: where the results of one backend go.");

namespace evenkeel {
namespace {

constexpr char kUsage[] = R"(Steps with and without data parallelism, side by side in one run.

  bazel run //tools:bench_step                                   the whole table, some minutes on a quiet machine
  bazel run //tools:bench_step -- --backends=tcp --plans=mlp:sgd --startups=0
  bazel run //tools:launch -- --nproc=4 -- $PWD/bazel-bin/tools/bench_step --backends=tcp

"local" trains without data parallelism on all ranks at the same time, so that the cores are as busy as in the other
rows. "update" is the optimizer's step. Ratios are medians over pairs of blocks, with their 95 % interval.)";

std::vector<std::string> ListOf(const std::string& text) {
  return absl::StrSplit(text, ',', absl::SkipEmpty());
}

absl::Status Unknown(absl::string_view flag, absl::string_view value, absl::string_view known) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": \"", value, "\" is none of ", known));
}

absl::StatusOr<std::vector<Row>> RowsAsGiven() {
  std::vector<Row> rows = {{"local", SyncWay::kLocal, {}}};
  const std::vector<std::string> skews = ListOf(FLAGS_skew);
  for (const std::string& skew : skews) {
    if (skew != "0" && skew != "10" && skew != "all") return Unknown("skew", skew, "0, 10, all");
  }
  rows.push_back({"reducer", SyncWay::kReducer, {}});
  if (FLAGS_check_finite) rows.push_back({"reducer, check_finite", SyncWay::kCheckFinite, {}});
  for (const std::string& join : ListOf(FLAGS_join)) {
    if (join == "none") continue;  // It is there: what others are compared with.
    if (join != "disabled" && join != "on") return Unknown("join", join, "none, disabled, on");
    const JoinUse use = join == "on" ? JoinUse::kOn : JoinUse::kDisabled;
    for (const std::string& skew : skews) {
      if (skew != "0" && use != JoinUse::kOn) continue;
      const Skew kind = skew == "0" ? Skew::kNone : skew == "10" ? Skew::kTen : Skew::kAll;
      const std::string name = absl::StrCat("reducer, join ", join, skew == "0" ? "" : ", skew ",
                                            skew == "0" ? "" : skew);
      rows.push_back({name, SyncWay::kReducer, {.join = use, .skew = kind}});
    }
  }
  for (const std::string& zero : ListOf(FLAGS_zero)) {
    if (zero != "sharded" && zero != "sliced") return Unknown("zero", zero, "sharded, sliced");
    rows.push_back({zero, zero == "sharded" ? SyncWay::kSharded : SyncWay::kSliced, {}});
  }
  return rows;
}

absl::StatusOr<PlanSettings> PlanAsGiven(const std::string& plan) {
  const std::vector<std::string> parts = absl::StrSplit(plan, ':');
  if (parts.size() != 2) return Unknown("plans", plan, "model:optimizer, as in mlp:sgd");
  PlanSettings settings{.rounds = FLAGS_pairs, .skewed_rounds = FLAGS_skewed_pairs};
  EK_RETURN_IF_ERROR(MakeStepModel(parts[0]).status());
  settings.training.model = parts[0];
  settings.training.views = FLAGS_views;
  if (parts[1] == "sgd") {
    settings.training.rule = Sgd{.learning_rate = 1e-3};
  } else if (parts[1] == "adamw") {
    settings.training.rule = AdamW{.learning_rate = 1e-5};
  } else {
    return Unknown("plans", parts[1], "sgd, adamw");
  }
  for (const std::string& cap : ListOf(FLAGS_caps_kb)) {
    int64_t kib = 0;
    if (!absl::SimpleAtoi(cap, &kib) || kib < 0) return Unknown("caps_kb", cap, "numbers from 0");
    settings.training.caps.push_back(Bytes{kib << 10});
  }
  settings.steps = FLAGS_steps > 0 ? FLAGS_steps : parts[0] == "gpt" ? 3 : 8;
  EK_ASSIGN_OR_RETURN(settings.rows, RowsAsGiven());
  return settings;
}

absl::Status CheckFlags() {
  if (FLAGS_world < 2) return absl::InvalidArgumentError("--world must be at least 2");
  if (FLAGS_pairs < 1 || FLAGS_skewed_pairs < 1 || FLAGS_steps < 0 || FLAGS_startups < 0) {
    return absl::InvalidArgumentError(
        "--pairs and --skewed_pairs must be at least 1, --steps and --startups at least 0");
  }
  for (const std::string& backend : ListOf(FLAGS_backends)) {
    if (backend != "tcp" && backend != "shm" && backend != "local") {
      return Unknown("backends", backend, "tcp, shm, local");
    }
  }
  for (const std::string& plan : ListOf(FLAGS_plans))
    EK_RETURN_IF_ERROR(PlanAsGiven(plan).status());
  return absl::OkStatus();
}

// All plans over one group.
absl::StatusOr<nlohmann::json> MeasureGroup(Communicator& comm, absl::string_view backend) {
  SetComputeThreads(1);
  nlohmann::json results = nlohmann::json::array();
  for (const std::string& plan : ListOf(FLAGS_plans)) {
    EK_ASSIGN_OR_RETURN(PlanSettings settings, PlanAsGiven(plan));
    if (backend == "local") settings.ranks_here = comm.world_size();
    EK_ASSIGN_OR_RETURN(const PlanResult result, MeasurePlan(comm, settings));
    nlohmann::json one = ToJson(result);
    one["backend"] = std::string(backend);
    one["world"] = comm.world_size();
    one["plan"] = plan;
    results.push_back(std::move(one));
  }
  return results;
}

absl::StatusOr<nlohmann::json> MeasureThreads() {
  nlohmann::json results;
  EK_RETURN_IF_ERROR(RunRanks(FLAGS_world, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(nlohmann::json mine, MeasureGroup(comm, "local"));
    if (comm.rank() == 0) results = std::move(mine);
    return absl::OkStatus();
  }));
  return results;
}

absl::Status WriteFile(const std::string& path, const nlohmann::json& json) {
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::Status Publish(const nlohmann::json& report) {
  std::cout << FormatReport(report);
  return FLAGS_json.empty() ? absl::OkStatus() : WriteFile(FLAGS_json, report);
}

nlohmann::json Facts(int world) {
  return {{"world", world},
          {"cores", static_cast<int64_t>(sysconf(_SC_NPROCESSORS_ONLN))},
          {"views", FLAGS_views},
          {"pairs", FLAGS_pairs}};
}

absl::Status RunRank(const Environment& environment) {
  nlohmann::json results = nlohmann::json::array();
  for (const std::string& backend : ListOf(FLAGS_backends)) {
    if (backend == "local" && environment.world_size > 1) {
      return absl::InvalidArgumentError(
          "--backends=local: its ranks are threads, not processes that a launcher starts");
    }
    nlohmann::json some;
    if (backend == "local") {
      EK_ASSIGN_OR_RETURN(some, MeasureThreads());
    } else {
      EK_ASSIGN_OR_RETURN(const auto comm,
                          CreateCommunicator(environment, {.backend = backend, .group = backend}));
      EK_ASSIGN_OR_RETURN(some, MeasureGroup(*comm, backend));
      EK_RETURN_IF_ERROR(comm->Finalize());
    }
    for (nlohmann::json& one : some) results.push_back(std::move(one));
  }
  if (environment.rank != 0) return absl::OkStatus();
  if (!FLAGS_report.empty()) return WriteFile(FLAGS_report, results);
  nlohmann::json report = Facts(environment.world_size);
  report["results"] = std::move(results);
  report["bars"] = JudgeReport(report);
  return Publish(report);
}

absl::StatusOr<nlohmann::json> StartRanks(const std::string& backend,
                                          std::vector<std::string> arguments,
                                          const std::string& folder) {
  arguments[0] = OwnPath();
  const std::string report = absl::StrCat(folder, "/", backend, ".json");
  arguments.insert(arguments.end(),
                   {absl::StrCat("--backends=", backend), absl::StrCat("--report=", report)});
  LaunchOptions launch{.ranks = backend == "local" ? 1 : FLAGS_world,
                       .command = std::move(arguments)};
  launch.variables["OMP_NUM_THREADS"] = "1";
  EK_ASSIGN_OR_RETURN(const LaunchResult result, Launch(launch));
  if (result.exit_code != 0)
    return absl::UnavailableError(absl::StrCat(backend, ": ", result.message));
  std::ifstream file(report);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  return internal::ParseStrictJson(text, /*max_depth=*/16, report, internal::JsonRoot::kAny);
}

absl::Status RunAll(const std::vector<std::string>& arguments) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<TemporaryFolder> folder,
                      TemporaryFolder::Create("bench_step"));
  nlohmann::json report = Facts(FLAGS_world);
  report["results"] = nlohmann::json::array();
  // First: minutes of measuring would be lost where the trainer or its data are missing.
  if (FLAGS_startups > 0) {
    EK_ASSIGN_OR_RETURN(
        report["startup"],
        MeasureStartups(
            {.program = FLAGS_trainer.empty() ? ProgramBeside("trainer/train") : FLAGS_trainer,
             .data_dir = FLAGS_data_dir,
             .folder = folder->path(),
             .ranks = FLAGS_world,
             .times = FLAGS_startups}));
  }
  for (const std::string& backend : ListOf(FLAGS_backends)) {
    std::cerr << "bench_step: " << backend << " ...\n";
    EK_ASSIGN_OR_RETURN(const nlohmann::json some, StartRanks(backend, arguments, folder->path()));
    for (const nlohmann::json& one : some) report["results"].push_back(one);
  }
  report["bars"] = JudgeReport(report);
  return Publish(report);
}

absl::StatusOr<int> Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  EK_RETURN_IF_ERROR(CheckFlags());
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_RETURN_IF_ERROR(environment.launcher.empty() ? RunAll(arguments) : RunRank(environment));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Main(argc, argv); });
}
