// The folder in which the ranks of a job leave their flight records, made and looked at before the
// job starts.
//
//   absl::StatusOr<std::string> folder = PrepareFlightFolder("/tmp/job");       // its full path
//
// For the program that starts a job, not for its ranks: a rank may find records of the others.
//
// Threads: pure but for the file system.
// Errors:  one sentence that begins with the folder. FailedPrecondition if it has records
//          (*.rank<r>.json) of an earlier job, which would be merged with this one's into one
//          account; the file system's own if it can't be written to.

#ifndef EVENKEEL_LAUNCH_FLIGHT_FOLDER_H_
#define EVENKEEL_LAUNCH_FLIGHT_FOLDER_H_

#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

absl::StatusOr<std::string> PrepareFlightFolder(const std::string& folder);

}  // namespace evenkeel

#endif  // EVENKEEL_LAUNCH_FLIGHT_FOLDER_H_
