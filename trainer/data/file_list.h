// The files that one path stands for: a file, a folder's files, or those that match a pattern.
//
//   EK_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesAt("data/fineweb_train_*.bin"));
//
// A folder stands for the regular files right in it, but for those whose name begins with a dot. A path that is neither
// file nor folder and has a *, ? or [ is a pattern as shells know them.
//
// Order:   by path, byte by byte, whatever the locale; never empty.
// Threads: pure functions, safe from any thread.
// Errors:  NotFound if there is no such file; else as the system says, with the path.

#ifndef EVENKEEL_TRAINER_DATA_FILE_LIST_H_
#define EVENKEEL_TRAINER_DATA_FILE_LIST_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

absl::StatusOr<std::vector<std::string>> FilesAt(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_FILE_LIST_H_
