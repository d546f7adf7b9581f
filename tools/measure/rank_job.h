// The ranks of a benchmark are processes of this program, which measure together.
//
//   if (!environment.launcher.empty()) return MeasureOnThisRank();
//   // waits for the end of all ranks
//   EK_RETURN_IF_ERROR(RunRankProcesses("tcp", {.ranks = 2, .command = command}));
//
//   // on each rank, all together
//   EK_ASSIGN_OR_RETURN(Numbers slowest, LargestOf(comm, seconds));
//
// Threads: as the communicator; RunRankProcesses() as Launch().
// Errors:  those of the group and of Launch(); Unavailable if a rank fails, with its number and how
//          it ended.

#ifndef EVENKEEL_TOOLS_MEASURE_RANK_JOB_H_
#define EVENKEEL_TOOLS_MEASURE_RANK_JOB_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/launch/launcher.h"
#include "nlohmann/json.hpp"

namespace evenkeel {

// Starts the ranks, and waits for the end of all. An error begins with `name`. If there is only one
// process, which may be an mpirun, the error names no rank.
absl::Status RunRankProcesses(absl::string_view name, const LaunchOptions& options);

using Numbers = std::vector<double>;
// Returns each rank's numbers, by rank.
absl::StatusOr<std::vector<Numbers>> GatherNumbers(Communicator& comm, const Numbers& mine);
// Returns the largest numbers of all ranks, element by element. All ranks pass equally many.
absl::StatusOr<Numbers> LargestOf(Communicator& comm, const Numbers& mine);

// Returns a line for popen(): the program with its arguments, of which the shell interprets none.
// It gets SIGTERM after `limit`, and SIGKILL 5 s later.
std::string ShellCommand(const std::vector<std::string>& words, absl::Duration limit);

// Writes a file for --json.
absl::Status WriteJson(const std::string& path, const nlohmann::json& json);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_RANK_JOB_H_
