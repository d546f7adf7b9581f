#include "evenkeel/tools/step/startup.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/launcher.h"
#include "evenkeel/tools/measure/paired_ratio.h"

extern char** environ;

namespace evenkeel {
namespace {

// A pipe with a name; its reading end here.
class Fifo {
 public:
  explicit Fifo(const std::string& path) : path_(path) {
    if (mkfifo(path.c_str(), 0600) != 0) return;
    // With a writer of its own it never ends, so nobody has to be in time.
    fd_ = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  }
  ~Fifo() {
    if (fd_ >= 0) close(fd_);
    unlink(path_.c_str());
  }
  Fifo(const Fifo&) = delete;
  Fifo& operator=(const Fifo&) = delete;

  bool is_valid() const { return fd_ >= 0; }

  // Whatever has come within that time.
  std::string Read(absl::Duration patience) {
    pollfd poll_fd{.fd = fd_, .events = POLLIN, .revents = 0};
    poll(&poll_fd, 1, static_cast<int>(absl::ToInt64Milliseconds(patience)));
    char buffer[4096];
    const ssize_t size = read(fd_, buffer, sizeof(buffer));
    return size > 0 ? std::string(buffer, size) : std::string();
  }

 private:
  const std::string path_;
  int fd_ = -1;
};

// Ended at the latest with this object.
class Process {
 public:
  Process(std::vector<std::string> command) {
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    error_ = posix_spawn(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error_ != 0) pid_ = -1;
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);  // The kernel ends its ranks with it.
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int error() const { return error_; }
  bool HasEnded() {
    if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
    return pid_ <= 0;
  }

 private:
  pid_t pid_ = -1;
  int error_ = 0;
};

struct Start {
  double group = 0, first_step = 0;
};

absl::StatusOr<Start> StartOnce(const StartupOptions& options) {
  const std::string path = absl::StrCat(options.folder, "/metrics");
  Fifo lines(path);
  if (!lines.is_valid())
    return absl::UnavailableError(absl::StrCat("cannot make a pipe at ", path));
  std::vector<std::string> command = {options.program, "--model=mlp",
                                      absl::StrCat("--nproc=", options.ranks), "--max_steps=100",
                                      absl::StrCat("--metrics=", path)};
  if (!options.data_dir.empty()) command.push_back(absl::StrCat("--data=", options.data_dir));
  const absl::Time begin = SteadyNow();
  Process process(std::move(command));
  if (process.error() != 0) {
    return absl::NotFoundError(
        absl::StrCat("cannot start ", options.program, ": ", std::strerror(process.error())));
  }
  Start start;
  std::string text;
  while (SteadyNow() - begin < options.timeout) {
    text += lines.Read(absl::Milliseconds(100));
    const double now = absl::ToDoubleSeconds(SteadyNow() - begin);
    if (start.group == 0 && absl::StrContains(text, R"("event":"run")")) start.group = now;
    if (absl::StrContains(text, R"("event":"step")")) {
      start.first_step = now;
      return start;
    }
    if (process.HasEnded()) break;
  }
  return absl::UnavailableError(absl::StrCat(options.program, " did not reach its first step"));
}

nlohmann::json Spread(const std::vector<double>& values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return {{"median", MedianOf(values)}, {"low", *low}, {"high", *high}};
}

}  // namespace

absl::StatusOr<nlohmann::json> MeasureStartups(const StartupOptions& options) {
  std::vector<double> groups, steps;
  for (int i = -1; i < options.times; ++i) {  // The first one fills the page cache.
    EK_ASSIGN_OR_RETURN(const Start start, StartOnce(options));
    if (i < 0) continue;
    groups.push_back(start.group);
    steps.push_back(start.first_step);
  }
  return nlohmann::json{{"times", options.times},
                        {"ranks", options.ranks},
                        {"group_seconds", Spread(groups)},
                        {"first_step_seconds", Spread(steps)}};
}

std::string ProgramBeside(const std::string& path) {
  return std::filesystem::path(OwnPath()).parent_path().parent_path() / path;
}

}  // namespace evenkeel
