// Predicts the time of a training step for other numbers of ranks: see kUsage.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/tools/predict/cluster.h"
#include "evenkeel/tools/predict/curve_page.h"
#include "evenkeel/tools/predict/replay.h"
#include "evenkeel/tools/predict/speed_model.h"
#include "evenkeel/tools/predict/traced_run.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"

DEFINE_string(profile, "",
              "Traces of a small run of the training, separated by commas: train "
              "--trace=FILE.json. Several runs of the same training give more steps.");
DEFINE_string(links, "",
              "More samples of collectives: traces over other links, and rows of "
              "bench_collectives --json=FILE.");
DEFINE_string(backend, "", "shm, tcp or hierarchical; empty: that of the profile.");
DEFINE_string(ranks, "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192",
              "The numbers of ranks; the default over shm ends with this host's processors.");
DEFINE_int32(ranks_per_host, 8,
             "With --backend=hierarchical; shm uses one host, tcp one rank per host.");
DEFINE_int32(cores, 0,
             "Processors that all ranks share, for runs on one machine; 0: each rank has its own, "
             "of which over shm there are as many as on this host.");
DEFINE_string(check, "", "Traces of runs with which the predictions are compared.");
DEFINE_string(html, "", "A file for a page with the curves.");
DEFINE_string(replay, "",
              "Under a launcher: runs the profile's step on its ranks, with real communication and "
              "sleep in place of computation, and writes the trace to this file.");
DEFINE_int32(steps, 30, "Steps of --replay.");

namespace evenkeel {
namespace {

constexpr char kUsage[] =
    R"(Predicts the time of a training step for any number of ranks, from a small run.

  train --nproc=2 --trace=two.json ...                            a profile
  predict --profile=two.json --links=net.json --backend=tcp --ranks=4,64,1024 --html=curve.html
                                                                  step, communication, efficiency
  predict --profile=two.json --check=four.json,eight.json         its errors on other runs
  launch --nproc=8 -- predict --profile=two.json --replay=eight.json --backend=tcp

The buckets of the profile are also the samples of the link. --links=FILES adds samples of other
links, or of more sizes: traces over shm are samples of memory, traces over tcp of the network, and
rows of bench_collectives over tcp of the host's own work. The interval encloses 95 % of the
predictions from resampled steps and samples. See tools/predict/README.md for the limits of the
model.)";

absl::StatusOr<std::vector<TracedRun>> ReadTraces(const std::string& files) {
  std::vector<TracedRun> runs;
  for (const std::string& file : ListOf(files)) {
    EK_ASSIGN_OR_RETURN(const std::string text, Annotate(ReadInput(file), file));
    EK_ASSIGN_OR_RETURN(TracedRun run, ParseTrace(file, text));
    runs.push_back(std::move(run));
  }
  return runs;
}

absl::StatusOr<std::vector<LevelSample>> ReadLinks() {
  std::vector<LevelSample> samples;
  for (const std::string& file : ListOf(FLAGS_links)) {
    EK_ASSIGN_OR_RETURN(const std::string text, Annotate(ReadInput(file), file));
    std::vector<LevelSample> more;
    if (absl::StrContains(text, "\"traceEvents\"")) {
      EK_ASSIGN_OR_RETURN(const TracedRun run, ParseTrace(file, text));
      more = SamplesOf(run, FLAGS_cores);
    } else {
      EK_ASSIGN_OR_RETURN(more, ParseRows(file, text, FLAGS_cores));
    }
    samples.insert(samples.end(), more.begin(), more.end());
  }
  return samples;
}

Layout LayoutOf(const std::string& backend, int ranks) {
  if (backend == "shm") return {.ranks = ranks, .ranks_per_host = ranks};
  return {.ranks = ranks, .ranks_per_host = backend == "tcp" ? 1 : FLAGS_ranks_per_host};
}

absl::StatusOr<std::vector<Forecast>> Forecasts(const SpeedModel& model) {
  // Over shared memory all ranks are on one host, and nothing is known of a link to another one.
  const int processors = static_cast<int>(std::thread::hardware_concurrency());  // 0: not known.
  const bool is_one_host = model.cluster().backend == "shm" && FLAGS_cores == 0 && processors > 0;
  const bool is_default = gflags::GetCommandLineFlagInfoOrDie("ranks").is_default;
  std::vector<Forecast> forecasts;
  for (const std::string& text : ListOf(FLAGS_ranks)) {
    int ranks = 0;
    if (!absl::SimpleAtoi(text, &ranks) || ranks < 1 || ranks > 1 << 20)
      return absl::InvalidArgumentError(
          absl::StrCat("--ranks: \"", text, "\" is not a number from 1 to 1048576"));
    if (is_one_host && ranks > processors) {
      if (is_default) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "--ranks: ", ranks, " ranks over shm are on one host, and this one has ", processors,
          " processors; for several hosts pass --backend=hierarchical or tcp with samples of their "
          "network (--links), for a host with other processors --cores"));
    }
    forecasts.push_back(model.At(LayoutOf(model.cluster().backend, ranks)));
  }
  return forecasts;
}

std::string Describe(const SpeedModel& model, const TracedRun& profile) {
  const StepParts& parts = model.parts();
  int64_t bytes = 0;
  for (const StepParts::Bucket& bucket : parts.buckets) bytes += bucket.bytes;
  std::string text = absl::StrFormat(
      "%s over %s: begin %.2f ms, computing %.2f ms (spread %.1f %%), optimizer %.2f ms; %d "
      "buckets of %.2f MiB together\n",
      profile.title, profile.backend, 1e3 * parts.begin, 1e3 * parts.compute, 100 * parts.spread,
      1e3 * parts.optimizer, parts.buckets.size(), static_cast<double>(bytes) / (1 << 20));
  for (int level = 0; level < kLevels; ++level) {
    std::vector<double> errors;
    for (const LevelSample& sample : model.samples()) {
      if (sample.level == static_cast<Level>(level))
        errors.push_back(model.cluster().SecondsOf(sample.level, sample.load) / sample.seconds - 1);
    }
    if (errors.empty()) continue;
    for (double& error : errors) error = std::abs(error);
    std::ranges::sort(errors);
    const LinkCost& cost = model.cluster().costs[level];
    absl::StrAppendFormat(&text,
                          "%-8s %.3f ms a turn, %.3f ms a MiB; %d samples; error of the fit: "
                          "up to %.0f %% for half of them, up to %.0f %% for 90 %% of them\n",
                          NameOf(static_cast<Level>(level)), 1e-6 * cost.latency_ns,
                          1e-6 * cost.ns_per_mib, errors.size(), 100 * errors[errors.size() / 2],
                          100 * errors[errors.size() * 9 / 10]);
  }
  return text;
}

std::string TableOf(const std::vector<Forecast>& forecasts, double alone) {
  std::string text = absl::StrFormat("\n%8s %12s %25s %12s %12s %11s\n", "ranks", "step ms",
                                     "95 % ms", "reducing ms", "exposed ms", "efficiency");
  for (const Forecast& at : forecasts) {
    absl::StrAppendFormat(&text, "%8d %12.2f %25s %12.2f %12.2f %9.1f %%\n", at.where.ranks,
                          1e3 * at.step,
                          absl::StrFormat("[%.2f, %.2f]", 1e3 * at.low, 1e3 * at.high),
                          1e3 * at.communication, 1e3 * at.exposed, 100 * alone / at.step);
  }
  return text;
}

// Returns the errors on the runs that the model was fitted to, then on the others.
absl::StatusOr<std::string> CheckAll(const SpeedModel& model, const std::vector<TracedRun>& profile,
                                     const std::vector<TracedRun>& others,
                                     std::vector<CheckedRun>& checked) {
  std::string text = absl::StrFormat("\n%8s %12s %12s %8s %11s  run\n", "ranks", "measured",
                                     "predicted", "error", "inside 95 %");
  for (const bool is_fitted : {true, false}) {
    for (const TracedRun& run : is_fitted ? profile : others) {
      if (run.backend != model.cluster().backend) {
        if (is_fitted) continue;  // Its steps are those of another link.
        return absl::InvalidArgumentError(
            absl::StrCat(run.name, ": its backend is ", run.backend, ", but the prediction's is ",
                         model.cluster().backend, "; give --backend"));
      }
      const Forecast at = model.At(LayoutOf(run.backend, run.ranks));
      const double measured = run.MedianStep();
      checked.push_back({.ranks = run.ranks, .seconds = measured, .is_fitted = is_fitted});
      absl::StrAppendFormat(&text, "%8d %9.2f ms %9.2f ms %+6.1f %% %11s  %s%s\n", run.ranks,
                            1e3 * measured, 1e3 * at.step, 100 * (at.step / measured - 1),
                            at.low <= measured && measured <= at.high ? "yes" : "no", run.name,
                            is_fitted ? " (fitted)" : "");
    }
  }
  return checked.empty() ? "" : text;
}

absl::Status RunReplay(const SpeedModel& model, const std::string& title) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  if (environment.world_size < 2) {
    return absl::InvalidArgumentError(
        "--replay needs at least two ranks; start it with launch --nproc=N -- predict ...");
  }
  EK_ASSIGN_OR_RETURN(
      const auto comm,
      CreateCommunicator(environment, {.backend = FLAGS_backend.empty() ? "auto" : FLAGS_backend}));
  EK_RETURN_IF_ERROR(
      Replay(*comm, model.parts(), {.steps = FLAGS_steps, .title = title}, FLAGS_replay));
  return comm->Finalize();
}

absl::Status PrintForecasts(const SpeedModel& model, const std::vector<TracedRun>& profile) {
  EK_ASSIGN_OR_RETURN(const std::vector<Forecast> forecasts, Forecasts(model));
  EK_ASSIGN_OR_RETURN(const std::vector<TracedRun> others, ReadTraces(FLAGS_check));
  const double alone = model.At({.ranks = 1, .ranks_per_host = 1}).step;
  std::vector<CheckedRun> checked;
  EK_ASSIGN_OR_RETURN(const std::string errors, CheckAll(model, profile, others, checked));
  const std::string text =
      absl::StrCat(Describe(model, profile.front()), TableOf(forecasts, alone), errors);
  EK_RETURN_IF_ERROR(Print(text));
  if (FLAGS_html.empty()) return absl::OkStatus();
  const std::string page = RenderCurves({.title = profile.front().title,
                                         .text = text,
                                         .alone = alone,
                                         .forecasts = forecasts,
                                         .checked = checked});
  return WriteFileAtomically(FLAGS_html, page);
}

absl::Status Main() {
  if (FLAGS_ranks_per_host < 1 || FLAGS_cores < 0 || FLAGS_steps < 4) {
    return absl::InvalidArgumentError(
        "--ranks_per_host must be at least 1, --cores at least 0, --steps at least 4");
  }
  EK_ASSIGN_OR_RETURN(const std::vector<TracedRun> profile, ReadTraces(FLAGS_profile));
  EK_ASSIGN_OR_RETURN(const std::vector<LevelSample> links, ReadLinks());
  // A replay needs the parts of the step alone, and no sample of its own backend.
  const bool replays = !FLAGS_replay.empty();
  EK_ASSIGN_OR_RETURN(
      const SpeedModel model,
      SpeedModel::Fit(profile, links,
                      {.backend = replays ? "" : FLAGS_backend, .cores = FLAGS_cores}));
  return replays ? RunReplay(model, profile.front().title) : PrintForecasts(model, profile);
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&]() -> absl::StatusOr<int> {
    EK_RETURN_IF_ERROR(evenkeel::ParseFlags(evenkeel::kUsage, argc, argv));
    EK_RETURN_IF_ERROR(evenkeel::Main());
    return EXIT_SUCCESS;
  });
}
