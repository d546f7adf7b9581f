#include "evenkeel/tests/training/program.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

extern char** environ;

namespace evenkeel {
namespace {

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Whatever tells a program that it is a rank of somebody else's job would confuse it; a test gives
// that itself.
std::vector<std::string> Environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    if (!added.contains(name)) environment.push_back(*entry);
  }
  for (const auto& [name, value] : added) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

}  // namespace

Program::Program(const std::vector<std::string>& command, const ProgramOptions& options)
    : deadline_(absl::Now() + options.timeout) {
  static std::atomic<int> number = 0;
  const std::string base = absl::StrCat(getenv("TEST_TMPDIR"), "/program", number++);
  out_path_ = base + ".out";
  err_path_ = base + ".err";
  std::vector<std::string> arguments = command;
  if (!options.folder.empty() && !absl::StartsWith(command[0], "/")) {
    char here[4096];
    if (getcwd(here, sizeof(here)) != nullptr) arguments[0] = absl::StrCat(here, "/", command[0]);
  }
  std::vector<std::string> environment = Environment(options.environment);
  const std::vector<char*> argv = Pointers(arguments), envp = Pointers(environment);
  pid_ = fork();
  if (pid_ != 0) return;
  setpgid(0, 0);
  const int out = open(out_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  const int err = open(err_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(126);
  if (!options.folder.empty() && chdir(options.folder.c_str()) != 0) _exit(126);
  execve(argv[0], argv.data(), envp.data());
  _exit(127);
}

Program::~Program() {
  if (pid_ < 0) return;
  kill(-pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

Ended Program::Wait() {
  Ended ended;
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (absl::Now() > deadline_) {
      ended.timed_out = true;
      kill(-pid_, SIGKILL);
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
  kill(-pid_, SIGKILL);  // Whoever is left.
  pid_ = -1;
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ended.out = Contents(out_path_);
  ended.err = Contents(err_path_);
  unlink(out_path_.c_str());
  unlink(err_path_.c_str());
  return ended;
}

std::vector<std::string> Lines(absl::string_view text) {
  return absl::StrSplit(text, '\n', absl::SkipWhitespace());
}

std::vector<pid_t> ProcessesWith(absl::string_view text) {
  std::vector<pid_t> found;
  DIR* const proc = opendir("/proc");
  if (proc == nullptr) return found;
  while (const dirent* entry = readdir(proc)) {
    int pid = 0;
    if (!absl::SimpleAtoi(entry->d_name, &pid) || pid == getpid()) continue;
    // A zombie's command line is empty.
    if (absl::StrContains(Contents(absl::StrCat("/proc/", pid, "/cmdline")), text))
      found.push_back(pid);
  }
  closedir(proc);
  return found;
}

pid_t PidOfRank(absl::string_view text, int rank) {
  for (const pid_t pid : ProcessesWith(text)) {
    const std::string environment = Contents(absl::StrCat("/proc/", pid, "/environ"));
    const std::vector<std::string> variables = absl::StrSplit(environment, '\0');
    if (std::ranges::count(variables, absl::StrCat("RANK=", rank)) > 0) return pid;
  }
  return -1;
}

}  // namespace evenkeel
