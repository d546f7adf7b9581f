// Shared by the programs of this folder: their beginning and end, their input and output.
//
//   absl::StatusOr<int> Run(const std::vector<std::string>& words);
//   int main(int argc, char** argv) {
//     return RunProgram([&] { return Run({argv + 1, argv + argc}); });
//   }
//
// Threads: call them from the main thread.

#ifndef EVENKEEL_TOOLS_PROGRAM_H_
#define EVENKEEL_TOOLS_PROGRAM_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

// Returns the exit code: that of `run`, or 1 after printing its error, or the exception that it
// throws, as "<name>: <message>" on standard error. A program calls itself by the name by which it
// was started: an installed one is "evenkeel-top".
int RunProgram(absl::FunctionRef<absl::StatusOr<int>()> run);

// Returns `usage` with that name in place of each $0.
std::string NameIn(absl::string_view usage);

// Prints NameIn(usage) and returns true if the flags before "--" ask for it; gflags would add flags
// of its own, and fail.
bool PrintsHelp(const char* usage, int argc, char** argv);

// Changes to the folder in which `bazel run` was called, to which the user's relative paths refer.
absl::Status EnterUserFolder();

// Parses the flags of gflags and calls EnterUserFolder(). Returns InvalidArgument for an argument
// that is not a flag. An unknown flag or a malformed value ends the program.
absl::Status ParseFlags(const char* usage, int argc, char** argv);

// Returns the value of an environment variable, or "" if it is not set.
std::string EnvironmentVariable(const char* name);

// Returns the parts of a flag's value between commas, without empty ones.
std::vector<std::string> ListOf(absl::string_view text);

// Returns the contents of a file of at most 1 GiB; an empty path means standard input.
absl::StatusOr<std::string> ReadInput(const std::string& path);

// Writes to standard output, and flushes it.
absl::Status Print(absl::string_view text);

// A new folder for temporary files, which is removed with this object.
class TemporaryFolder {
 public:
  static absl::StatusOr<std::unique_ptr<TemporaryFolder>> Create(absl::string_view program);
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_PROGRAM_H_
