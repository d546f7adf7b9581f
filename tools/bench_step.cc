// Measures what data parallelism adds to a training step, on this host: see --help.
//
//   without a launcher       starts the ranks, gathers, prints
//   under a launcher         is one of its ranks and measures; rank 0 prints, or writes for the
//                            process that has started it

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/launch/launcher.h"
#include "evenkeel/tools/measure/rank_job.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/tools/step/startup.h"
#include "evenkeel/tools/step/step_measurement.h"
#include "evenkeel/tools/step/step_report.h"
#include "evenkeel/tools/step/step_training.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "gflags/gflags.h"
#include "nlohmann/json.hpp"

DEFINE_string(backends, "shm,tcp", "Backends to measure: shm, tcp.");
DEFINE_int32(world, 2, "Ranks to start.");
DEFINE_string(plans, "mlp:sgd,mlp:adamw,gpt:adamw",
              "Models (mlp: 784-1024-1024-10 with batch 64; gpt: 4 layers of width 128; tiny), "
              "each with its optimizer.");
DEFINE_string(rows, "local,reducer,check_finite,join,sharded,sliced",
              "Ways to train: without data parallelism; with it; with "
              "ReducerOptions::check_finite; with RunJoined(); with an optimizer that owns whole "
              "tensors, or slices.");
DEFINE_int32(pairs, 30, "Blocks of each row; at least 30 for a ratio to be quoted.");
DEFINE_int32(steps, 0, "Steps per block; 0: 8, for gpt 3.");
DEFINE_int32(startups, 10,
             "How many times //trainer:train is started, up to the end of its first step.");
DEFINE_string(trainer, "",
              "The program that --startups starts; empty: the one that was built with this one.");
DEFINE_string(data_dir, "", "The data of --trainer; empty: its default.");
DEFINE_string(json, "", "A file for all results, as JSON.");
DEFINE_string(report, "", "Set for the ranks that it starts: the file for their results.");

namespace evenkeel {
namespace {

constexpr char kUsage[] = R"(Steps with and without data parallelism, side by side in one run.

  bazel run //tools:bench_step                                   the whole table, some minutes on a quiet machine
  bazel run //tools:bench_step -- --backends=tcp --plans=mlp:sgd --startups=0
  bazel run //tools:launch -- --nproc=4 -- $PWD/bazel-bin/tools/bench_step --backends=tcp

"local" trains without data parallelism on all ranks at the same time, so that the cores are as busy as in the other
rows. "update" is the optimizer's step. Ratios are medians over pairs of blocks, with their 95 % interval.)";

const std::pair<const char*, StepRow> kRows[] = {
    {"local", {"local", SyncWay::kLocal}},
    {"reducer", {"reducer", SyncWay::kReducer}},
    {"check_finite", {"reducer, check_finite", SyncWay::kCheckFinite}},
    {"join", {"reducer, join on", SyncWay::kReducer, /*joins=*/true}},
    {"sharded", {"sharded", SyncWay::kSharded}},
    {"sliced", {"sliced", SyncWay::kSliced}}};

absl::Status Unknown(absl::string_view flag, absl::string_view value, absl::string_view known) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": \"", value, "\" is none of ", known));
}

absl::StatusOr<std::vector<StepRow>> RowsAsGiven() {
  std::vector<StepRow> rows;
  for (const std::string& name : ListOf(FLAGS_rows)) {
    const auto* const row =
        std::ranges::find_if(kRows, [&](const auto& each) { return name == each.first; });
    if (row == std::end(kRows)) {
      const auto add = [](std::string* out, const auto& each) { out->append(each.first); };
      return Unknown("rows", name, absl::StrJoin(kRows, ", ", add));
    }
    rows.push_back(row->second);
  }
  if (rows.empty()) return absl::InvalidArgumentError("--rows must name at least one row");
  return rows;
}

absl::StatusOr<PlanSettings> PlanAsGiven(const std::string& plan) {
  const std::vector<std::string> parts = absl::StrSplit(plan, ':');
  if (parts.size() != 2) return Unknown("plans", plan, "model:optimizer, as in mlp:sgd");
  PlanSettings settings{.rounds = FLAGS_pairs};
  EK_RETURN_IF_ERROR(MakeStepModel(parts[0]).status());
  settings.training.model = parts[0];
  if (parts[1] == "sgd") {
    settings.training.rule = Sgd{.learning_rate = 1e-3};
  } else if (parts[1] == "adamw") {
    settings.training.rule = AdamW{.learning_rate = 1e-5};
  } else {
    return Unknown("plans", parts[1], "sgd, adamw");
  }
  settings.steps = FLAGS_steps > 0 ? FLAGS_steps : parts[0] == "gpt" ? 3 : 8;
  EK_ASSIGN_OR_RETURN(settings.rows, RowsAsGiven());
  return settings;
}

absl::Status CheckFlags() {
  if (FLAGS_world < 2) return absl::InvalidArgumentError("--world must be at least 2");
  if (FLAGS_pairs < 1 || FLAGS_steps < 0 || FLAGS_startups < 0) {
    return absl::InvalidArgumentError(
        "--pairs must be at least 1, --steps and --startups at least 0");
  }
  for (const std::string& backend : ListOf(FLAGS_backends)) {
    if (backend != "tcp" && backend != "shm") return Unknown("backends", backend, "tcp, shm");
  }
  for (const std::string& plan : ListOf(FLAGS_plans))
    EK_RETURN_IF_ERROR(PlanAsGiven(plan).status());
  return absl::OkStatus();
}

absl::Status Publish(nlohmann::json report, int world) {
  report["world"] = world;
  report["cores"] = static_cast<int64_t>(sysconf(_SC_NPROCESSORS_ONLN));
  report["pairs"] = FLAGS_pairs;
  report["bars"] = JudgeReport(report);
  std::cout << FormatReport(report);
  return FLAGS_json.empty() ? absl::OkStatus() : WriteJson(FLAGS_json, report);
}

// All backends and plans.
absl::Status RunRank(const Environment& environment) {
  SetComputeThreads(1);
  nlohmann::json results = nlohmann::json::array();
  for (const std::string& backend : ListOf(FLAGS_backends)) {
    EK_ASSIGN_OR_RETURN(const auto comm,
                        CreateCommunicator(environment, {.backend = backend, .group = backend}));
    for (const std::string& plan : ListOf(FLAGS_plans)) {
      if (environment.rank == 0) std::cerr << "bench_step: " << backend << ", " << plan << " ...\n";
      EK_ASSIGN_OR_RETURN(const PlanSettings settings, PlanAsGiven(plan));
      EK_ASSIGN_OR_RETURN(nlohmann::json result, MeasurePlan(*comm, settings));
      result["backend"] = backend;
      result["plan"] = plan;
      results.push_back(std::move(result));
    }
    EK_RETURN_IF_ERROR(comm->Finalize());
  }
  if (environment.rank != 0) return absl::OkStatus();
  if (!FLAGS_report.empty()) return WriteJson(FLAGS_report, results);
  return Publish({{"results", std::move(results)}}, environment.world_size);
}

absl::Status RunAll(std::vector<std::string> arguments) {
  nlohmann::json report = {{"results", nlohmann::json::array()}};
  // First: minutes of measuring would be lost where the trainer or its data are missing.
  if (FLAGS_startups > 0) {
    EK_ASSIGN_OR_RETURN(
        report["startup"],
        MeasureStartups(
            {.program = FLAGS_trainer.empty() ? ProgramBeside("trainer/train") : FLAGS_trainer,
             .data_dir = FLAGS_data_dir,
             .ranks = FLAGS_world,
             .times = FLAGS_startups}));
  }
  if (!ListOf(FLAGS_backends).empty()) {
    EK_ASSIGN_OR_RETURN(const auto folder, TemporaryFolder::Create("bench_step"));
    const std::string path = folder->path() + "/results.json";
    arguments[0] = OwnPath();
    arguments.push_back(absl::StrCat("--report=", path));
    EK_RETURN_IF_ERROR(RunRankProcesses("the ranks", {.ranks = FLAGS_world,
                                                      .command = std::move(arguments),
                                                      .variables = {{"OMP_NUM_THREADS", "1"}}}));
    EK_ASSIGN_OR_RETURN(const std::string text, ReadInput(path));
    EK_ASSIGN_OR_RETURN(report["results"], internal::ParseStrictJson(text, /*max_depth=*/16, path,
                                                                     internal::JsonRoot::kAny));
  }
  return Publish(std::move(report), FLAGS_world);
}

absl::StatusOr<int> Main(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  EK_RETURN_IF_ERROR(CheckFlags());
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_RETURN_IF_ERROR(environment.launcher.empty() ? RunAll(std::move(arguments))
                                                  : RunRank(environment));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Main(argc, argv); });
}
