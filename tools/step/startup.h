// Measures the time of the trainer from its start to the end of its first step.
//
//   EK_ASSIGN_OR_RETURN(nlohmann::json result,
//                          MeasureStartups({.program = ProgramBeside("trainer/train")}));
//
// Returns {"times", "ranks", "group_seconds", "first_step_seconds"}. The last two are {"median",
// "low", "high"}, with the quickest and the slowest start: the time until the group exists and its
// parameters are equal, and until the end of the first step. Time begins before the program is
// executed.
//
// Threads: blocking.
// Errors:  NotFound if there is no such program; Unavailable if it ends before its first step, or
//          has not reached it after `timeout`. It writes to the standard error of this process.

#ifndef EVENKEEL_TOOLS_STEP_STARTUP_H_
#define EVENKEEL_TOOLS_STEP_STARTUP_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace evenkeel {

struct StartupOptions {
  std::string program;   // //trainer:train
  std::string data_dir;  // Empty: the program's default.
  int ranks = 2;
  int times = 10;
  absl::Duration timeout = absl::Seconds(60);  // Per start.
};

absl::StatusOr<nlohmann::json> MeasureStartups(const StartupOptions& options);

// Returns the path of a program that Bazel has built together with this one.
std::string ProgramBeside(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STARTUP_H_
