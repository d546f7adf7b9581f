// Runs a program as a person would, and gives back all that it said.
//
//   const Ended ended = Run({"trainer/train", "--model=mlp"}, {.environment = {{"RANK", "0"}}});
//   ended.code, ended.out, ended.err
//
// The program and all that it starts is a process group, which is killed when its time is over, and
// when a Program that still runs goes out of scope: no test leaves a process behind.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TESTS_TRAINING_PROGRAM_H_
#define EVENKEEL_TESTS_TRAINING_PROGRAM_H_

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

struct Ended {
  int code = -1;  // 128 + signal if it was killed, as a shell says it.
  bool timed_out = false;
  std::string out, err;
};

struct ProgramOptions {
  std::map<std::string, std::string> environment;  // Added to this process's.
  std::string folder;                              // Where it runs; empty: here.
  absl::Duration timeout = absl::Seconds(50);
};

class Program {
 public:
  explicit Program(const std::vector<std::string>& command, const ProgramOptions& options = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  Ended Wait();

 private:
  const absl::Time deadline_;
  std::string out_path_, err_path_;
  pid_t pid_ = -1;  // -1: it has been waited for.
};

inline Ended Run(const std::vector<std::string>& command, const ProgramOptions& options = {}) {
  return Program(command, options).Wait();
}

std::vector<std::string> Lines(absl::string_view text);  // Without empty ones.

// Running processes, other than this one, whose command line has `text` in it.
std::vector<pid_t> ProcessesWith(absl::string_view text);
// Returns the one among them that was started as `rank`; -1 if there is none.
pid_t PidOfRank(absl::string_view text, int rank);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_TRAINING_PROGRAM_H_
