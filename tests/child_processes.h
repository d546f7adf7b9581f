// Programs that run beside this one, and the lines that they say.
//
//   ChildProcesses children;
//   EK_RETURN_IF_ERROR(children.Start({self, "--role=rank"}, {{"RANK", "0"}}));
//   bool all_over = children.Listen(deadline, [&](int child, absl::string_view line) { ... });
//
// Destruction kills what still runs. A child ends with the thread that started it, if it says
// EndWithParent() first.
//
// Threads: thread-compatible.
// Errors:  Unavailable if a process can't be made.

#ifndef EVENKEEL_TESTS_CHILD_PROCESSES_H_
#define EVENKEEL_TESTS_CHILD_PROCESSES_H_

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

using Variables = std::map<std::string, std::string>;

class ChildProcesses {
 public:
  ChildProcesses() = default;
  ~ChildProcesses();
  ChildProcesses(const ChildProcesses&) = delete;
  ChildProcesses& operator=(const ChildProcesses&) = delete;

  // The next child; they are numbered from 0. `variables` are added to this process's environment.
  absl::Status Start(const std::vector<std::string>& command, const Variables& variables);
  // Gives each line of a standard output to `on_line`, until all children have ended, or `is_over`
  // says so: true; or the deadline has come: false.
  bool Listen(
      absl::Time deadline, absl::FunctionRef<void(int child, absl::string_view line)> on_line,
      absl::FunctionRef<bool()> is_over = [] { return false; });

  // To its standard input.
  void Tell(int child, absl::string_view text);
  void Kill(int child);
  void Signal(int child, int signal);
  pid_t process(int child) const { return children_[child].pid; }
  bool is_running(int child) const { return children_[child].pid > 0; }
  int count() const { return static_cast<int>(children_.size()); }
  // Returns the exit code of an ended child, as a shell reports it: 128 + signal if it was killed.
  int exit_code(int child) const { return children_[child].exit_code; }
  // Returns the child's output on standard error.
  const std::string& complaints(int child) const { return children_[child].err; }

 private:
  struct Child {
    pid_t pid = -1;  // -1: has been waited for.
    int exit_code = 0;
    int in = -1, out_fd = -1, err_fd = -1;
    std::string out, err;
  };

  void Reap(Child& child);

  std::vector<Child> children_;
};

// In a child: it is killed when the thread that started it ends.
void EndWithParent();

// Returns the variables by which the ranks of a job of `world_size` find each other on this host.
// `store` is the address of a server of another process, or a folder if rank 0 hosts the store.
Variables RankVariables(int rank, int world_size, const std::string& store,
                        const std::string& secret);

// The path of this program, to start it again.
std::string ThisProgram();

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CHILD_PROCESSES_H_
