// A shell command and its output, for the tests of programs.

#ifndef EVENKEEL_TOOLS_GPU_TESTING_RUN_COMMAND_H_
#define EVENKEEL_TOOLS_GPU_TESTING_RUN_COMMAND_H_

#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace evenkeel {

struct CommandResult {
  int exit_code = -1;
  std::string out, error;
};

inline std::string ReadWholeFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline CommandResult RunCommand(const std::string& command) {
  const std::string out = absl::StrCat(testing::TempDir(), "/out"),
                    error = absl::StrCat(testing::TempDir(), "/error");
  const int status =
      std::system(absl::StrCat("( ", command, " ) >'", out, "' 2>'", error, "'").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadWholeFile(out), ReadWholeFile(error)};
}

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_GPU_TESTING_RUN_COMMAND_H_
