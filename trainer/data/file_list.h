// The files of a path, which is a file, a folder or a pattern.
//
//   EK_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesAt("data/fineweb_train_*.bin"));
//
// A folder stands for its regular files, without those in subfolders and those whose name begins
// with a dot. A path that is neither a file nor a folder and contains *, ? or [ is a shell pattern.
//
// Order:   by path, byte by byte, whatever the locale; never empty.
// Threads: pure functions, safe from any thread.
// Errors:  NotFound if no file exists; else the system's own, with the path.

#ifndef EVENKEEL_TRAINER_DATA_FILE_LIST_H_
#define EVENKEEL_TRAINER_DATA_FILE_LIST_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

absl::StatusOr<std::vector<std::string>> FilesAt(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_FILE_LIST_H_
