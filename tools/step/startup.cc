#include "evenkeel/tools/step/startup.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/launch/launcher.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rank_job.h"

namespace evenkeel {
namespace {

struct PipeCloser {
  void operator()(std::FILE* pipe) const { pclose(pipe); }
};

struct Start {
  double group = 0, first_step = 0;
};

// The program writes its events to this process.
absl::StatusOr<Start> StartOnce(const StartupOptions& options) {
  std::vector<std::string> words = {options.program, "--model=mlp",
                                    absl::StrCat("--nproc=", options.ranks), "--max_steps=1",
                                    "--metrics=/dev/stdout"};
  if (!options.data_dir.empty()) words.push_back(absl::StrCat("--data=", options.data_dir));
  const std::string command = ShellCommand(words, options.timeout);
  const absl::Time begin = SteadyNow();
  const std::unique_ptr<std::FILE, PipeCloser> pipe(popen(command.c_str(), "re"));
  if (pipe == nullptr) return absl::ErrnoToStatus(errno, "cannot start a shell");
  Start start;
  for (char line[1024]; std::fgets(line, sizeof(line), pipe.get()) != nullptr;) {
    const double now = absl::ToDoubleSeconds(SteadyNow() - begin);
    if (start.group == 0 && absl::StrContains(line, R"("event":"run")")) start.group = now;
    if (start.first_step == 0 && absl::StrContains(line, R"("event":"step")"))
      start.first_step = now;
  }
  if (start.first_step > 0) return start;
  return absl::UnavailableError(absl::StrCat(options.program, " did not reach its first step"));
}

nlohmann::json Spread(const std::vector<double>& values) {
  return {{"median", MedianOf(values)},
          {"low", QuantileOf(values, 0)},
          {"high", QuantileOf(values, 1)}};
}

}  // namespace

absl::StatusOr<nlohmann::json> MeasureStartups(const StartupOptions& options) {
  if (access(options.program.c_str(), X_OK) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot start ", options.program));
  std::vector<double> groups, steps;
  for (int i = -1; i < options.times; ++i) {  // The first one fills the page cache.
    EK_ASSIGN_OR_RETURN(const Start start, StartOnce(options));
    if (i < 0) continue;
    groups.push_back(start.group);
    steps.push_back(start.first_step);
  }
  return nlohmann::json{{"times", options.times},
                        {"ranks", options.ranks},
                        {"group_seconds", Spread(groups)},
                        {"first_step_seconds", Spread(steps)}};
}

std::string ProgramBeside(const std::string& path) {
  return std::filesystem::path(OwnPath()).parent_path().parent_path() / path;
}

}  // namespace evenkeel
