// Puts files into a folder, in place of those that an earlier installation has put there.
//
//   EK_ASSIGN_OR_RETURN(InstallSummary done,
//                       InstallFiles("/opt/evenkeel", {{"lib/pkgconfig/evenkeel.pc", text}, ...}));
//
// A file is installed as a whole or not at all; an unchanged file is not touched, so that it causes
// no rebuild. A list of all files, kInstalledFilesPath, says what a later
// installation may replace or remove; it names every file before that is written. Files that are
// not in the list are left alone.
//
// Threads: one installation into a folder at a time.
// Errors:  before anything is written: InvalidArgument for a path that is not ours
//          (IsInstalledPath()), FailedPrecondition if a file of others is where one of ours
//          belongs, DataLoss if the list names what no installation writes; each with the file.
//          Then the file system's own; a second installation continues from there.

#ifndef EVENKEEL_TOOLS_INSTALLATION_PREFIX_H_
#define EVENKEEL_TOOLS_INSTALLATION_PREFIX_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

inline constexpr char kInstalledFilesPath[] = "share/evenkeel/installed_files.txt";
// The paths of programs begin with this; their files are executable.
inline constexpr char kProgramPath[] = "bin/evenkeel-";

struct FileToInstall {
  std::string path;  // Below the prefix.
  std::string content;
};

struct InstallSummary {
  int written = 0, unchanged = 0, removed = 0;
};

// Returns true if `path` may be a file of evenkeel: below include/evenkeel/ and similar folders.
bool IsInstalledPath(absl::string_view path);

// The prefix is made if it isn't there.
absl::StatusOr<InstallSummary> InstallFiles(const std::string& prefix,
                                            const std::vector<FileToInstall>& files);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_INSTALLATION_PREFIX_H_
