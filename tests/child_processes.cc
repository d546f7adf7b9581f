#include "evenkeel/tests/child_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

extern char** environ;

namespace evenkeel {
namespace {

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> EnvironmentWith(const Variables& added) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!added.contains(std::string(*entry, std::strcspn(*entry, "="))))
      environment.push_back(*entry);
  }
  for (const auto& [name, value] : added) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

void Close(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

// False at the end of the stream.
bool ReadSome(int fd, std::string& to) {
  char bytes[4096];
  const ssize_t size = read(fd, bytes, sizeof(bytes));
  if (size > 0) to.append(bytes, size);
  return size > 0 || (size < 0 && (errno == EINTR || errno == EAGAIN));
}

}  // namespace

ChildProcesses::~ChildProcesses() {
  for (size_t i = 0; i < children_.size(); ++i) Kill(static_cast<int>(i));
  for (Child& child : children_) Reap(child);
}

absl::Status ChildProcesses::Start(const std::vector<std::string>& command,
                                   const Variables& variables) {
  int in[2], out[2], err[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  posix_spawn_file_actions_adddup2(&actions, err[1], 2);
  // Who talks to processes that die ignores SIGPIPE; its children shall not.
  sigset_t as_by_default;
  sigemptyset(&as_by_default);
  sigaddset(&as_by_default, SIGPIPE);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setsigdefault(&attributes, &as_by_default);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  std::vector<std::string> arguments = command, environment = EnvironmentWith(variables);
  Child child{.in = in[1], .out_fd = out[0], .err_fd = err[0]};
  const int error = posix_spawn(&child.pid, command[0].c_str(), &actions, &attributes,
                                Pointers(arguments).data(), Pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(in[0]);
  close(out[1]);
  close(err[1]);
  if (error != 0) child.pid = -1;
  children_.push_back(child);
  return error == 0 ? absl::OkStatus()
                    : absl::UnavailableError(
                          absl::StrCat("cannot run ", command[0], ": ", std::strerror(error)));
}

bool ChildProcesses::Listen(absl::Time deadline,
                            absl::FunctionRef<void(int, absl::string_view)> on_line,
                            absl::FunctionRef<bool()> is_over) {
  while (true) {
    std::vector<pollfd> fds;
    std::vector<int> owners;
    for (int i = 0; i < count(); ++i) {
      for (int fd : {children_[i].out_fd, children_[i].err_fd}) {
        if (fd < 0) continue;
        fds.push_back({.fd = fd, .events = POLLIN, .revents = 0});
        owners.push_back(i);
      }
    }
    if (fds.empty() || is_over()) return true;
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    poll(fds.data(), fds.size(),
         static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(left) + 1, INT_MAX)));
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      Child& child = children_[owners[i]];
      const bool is_out = fds[i].fd == child.out_fd;
      const bool goes_on = ReadSome(fds[i].fd, is_out ? child.out : child.err);
      for (size_t end; is_out && (end = child.out.find('\n')) != std::string::npos;) {
        const std::string line = child.out.substr(0, end);
        child.out.erase(0, end + 1);
        on_line(owners[i], line);
      }
      if (!goes_on) Close(is_out ? child.out_fd : child.err_fd);
      if (child.out_fd < 0 && child.err_fd < 0) Reap(child);
    }
  }
}

void ChildProcesses::Tell(int child, absl::string_view text) {
  (void)!write(children_[child].in, text.data(), text.size());
}

void ChildProcesses::Kill(int child) { Signal(child, SIGKILL); }

void ChildProcesses::Signal(int child, int signal) {
  if (children_[child].pid > 0) kill(children_[child].pid, signal);
}

// Its output has ended, or it was killed: it ends now.
void ChildProcesses::Reap(Child& child) {
  int status = 0;
  if (child.pid > 0 && waitpid(child.pid, &status, 0) == child.pid) {
    child.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  child.pid = -1;
  Close(child.in);
  Close(child.out_fd);
  Close(child.err_fd);
}

void EndWithParent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

Variables RankVariables(int rank, int world_size, const std::string& store,
                        const std::string& secret) {
  Variables variables = {{"RANK", absl::StrCat(rank)},
                         {"LOCAL_RANK", absl::StrCat(rank)},
                         {"WORLD_SIZE", absl::StrCat(world_size)},
                         {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
                         {"EVENKEEL_STORE", store},
                         {"EVENKEEL_SECRET", secret}};
  if (!absl::StrContains(store, '/')) variables["EVENKEEL_STORE_HOSTED"] = "1";
  return variables;
}

std::string ThisProgram() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  return size > 0 ? std::string(path, size) : std::string();
}

}  // namespace evenkeel
