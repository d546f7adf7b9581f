// Programs that run beside this one, whose output goes to a file.
//
//   EK_ASSIGN_OR_RETURN(const pid_t pid, Spawn({.command = {"mpirun", "-n", "2", path}}, log));
//   EK_ASSIGN_OR_RETURN(const std::string said,
//                       RunToEnd({.command = {"mpicxx", "bench_step.cc"}}, log));
//
// Errors: Unavailable; of RunToEnd() also with what the program said if it did not end well.

#ifndef EVENKEEL_TOOLS_BENCH_PROCESS_H_
#define EVENKEEL_TOOLS_BENCH_PROCESS_H_

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel::bench {

struct Program {
  std::vector<std::string> command;              // A name without '/' is looked for in PATH.
  std::map<std::string, std::string> variables;  // Added to this process's environment.
};

// Starts it; its standard input is empty, and its output is appended to the file `log`.
absl::StatusOr<pid_t> Spawn(const Program& program, const std::string& log);

// Waits for its end without a deadline, and returns its output.
absl::StatusOr<std::string> RunToEnd(const Program& program, const std::string& log);

// The end of what has been said, of a length for messages.
std::string EndOfLog(const std::string& log);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_PROCESS_H_
