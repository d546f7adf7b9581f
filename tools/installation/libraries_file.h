// The file that the rule of libraries.bzl writes: archives, headers, and the other libraries that a
// program must be linked with.
//
//   // of libraries.json
//   EK_ASSIGN_OR_RETURN(const LibrariesFile libraries, ReadLibrariesFile(text));
//
// Threads: pure function, safe from any thread.
// Errors:  InvalidArgument for a text that is no such file.

#ifndef EVENKEEL_TOOLS_INSTALLATION_LIBRARIES_FILE_H_
#define EVENKEEL_TOOLS_INSTALLATION_LIBRARIES_FILE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

// A `file` lies below the folder in which Bazel starts programs.
struct LibrariesFile {
  struct Archive {
    std::string part;  // "comm"
    std::string file;
  };
  std::vector<Archive> archives;  // Each may need those after it.
  std::map<std::string, std::string>
      headers;  // "evenkeel/comm/types.h" to its file: all that could be included.
  std::vector<std::string> public_headers;  // Those for users.
  std::vector<std::string> programs;        // Their files.
  std::vector<std::string> abseil;          // Abseil's libraries: "status" is libabsl_status.
  std::vector<std::string> link_flags;  // For the compiler: "-l:libssl.so", "-L/folder", "-Wl,...".
};

absl::StatusOr<LibrariesFile> ReadLibrariesFile(absl::string_view text);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_INSTALLATION_LIBRARIES_FILE_H_
