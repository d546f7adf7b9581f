#include "evenkeel/tools/bench/process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/program.h"

extern char** environ;

namespace evenkeel::bench {
namespace {

constexpr size_t kMostOfLog = 800;

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> EnvironmentWith(const std::map<std::string, std::string>& added) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!added.contains(std::string(*entry, std::strcspn(*entry, "="))))
      environment.push_back(*entry);
  }
  for (const auto& [name, value] : added) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

}  // namespace

absl::StatusOr<pid_t> Spawn(const Program& program, const std::string& log) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  std::vector<std::string> command = program.command,
                           environment = EnvironmentWith(program.variables);
  pid_t pid = -1;
  const int error = posix_spawnp(&pid, command[0].c_str(), &actions, nullptr,
                                 Pointers(command).data(), Pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error == 0) return pid;
  return absl::UnavailableError(
      absl::StrCat("cannot run ", command[0], ": ", std::strerror(error)));
}

absl::StatusOr<std::string> RunToEnd(const Program& program, const std::string& log) {
  EK_ASSIGN_OR_RETURN(const pid_t pid, Spawn(program, log));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return ReadInput(log);
  return absl::UnavailableError(
      absl::StrCat(absl::StrJoin(program.command, " "), " failed: ", EndOfLog(log)));
}

std::string EndOfLog(const std::string& log) {
  std::string text = ReadInput(log).value_or("");
  while (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.empty()) return "the log is empty";
  return text.size() <= kMostOfLog ? text
                                   : absl::StrCat("... ", text.substr(text.size() - kMostOfLog));
}

}  // namespace evenkeel::bench
