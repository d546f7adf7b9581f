// Starts the ranks of a job as processes on this host, and ends them together, or lets those that are left go on.
//
//   absl::StatusOr<LaunchResult> result = Launch({.ranks = 4, .command = {"./my_program", "--epochs=3"}});
//   if (!result.ok()) return Fail(result.status());                       // nothing was started
//   if (!result->message.empty()) std::cerr << result->message << "\n";   // "rank 1 was killed by SIGSEGV"
//   return result->exit_code;
//
// Each rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, and a free
// MASTER_PORT, for programs whose rank 0 wants to listen there), the address of a store that this process hosts, and a
// fresh secret. The secret is handed over in the environment: that is readable for the same user only, as a file would
// be, and nothing is left to clean up when this process is killed.
//
// Ranks form a process group of their own, so that a terminal's Ctrl-C reaches them once, through here: SIGINT, SIGTERM
// and SIGHUP are forwarded, and the ranks may take their time over the first one (to save, for instance); the second
// one kills. SIGUSR1 is forwarded as often as it comes: ranks that say so (comm/flight_signal.h) write down where they
// are. Their standard input is /dev/null. If this process is killed, the kernel kills them.
//
// A rank fails when a signal kills it or its exit code is not 0. What then happens to the others:
//   kStop      they have `patience` to end by themselves, with their own message; then SIGTERM, then SIGKILL.
//   kContinue  nothing: the store stays up until the last rank has ended, so that the ranks that are left can make a
//              new group (join/recovery.h). A failed rank is not started again. When one has ended well, the job is
//              done, and those that are still there have `last_patience`, each time that one more ends well; then they
//              are ended as with kStop. If they are all stopped (SIGSTOP), they have just `patience`.
//
// Threads: blocking; call it from the main thread, before other threads are started: it blocks signals for a while.
// Errors:  InvalidArgument for a number of ranks below 1 or no command; NotFound if the program can't be executed;
//          Unavailable if a process or the store can't be made. A rank that fails is no error here, but in the result.

#ifndef EVENKEEL_TOOLS_LAUNCHER_H_
#define EVENKEEL_TOOLS_LAUNCHER_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

enum class OnFailure { kStop, kContinue };

struct LaunchOptions {
  int ranks = 1;
  // Program and arguments. A name without '/' is looked for in PATH.
  std::vector<std::string> command;
  // Added to this process's environment, or in its place.
  std::map<std::string, std::string> variables;
  absl::Duration patience = absl::Seconds(5);  // Before SIGTERM, and again before SIGKILL.
  OnFailure on_failure = OnFailure::kStop;
  // With kContinue, before SIGTERM for ranks that have not ended though another one has, and well.
  absl::Duration last_patience = absl::Seconds(60);
};

struct LaunchResult {
  // 0 if all ranks ended well, and with kContinue also if at least one did: each of the others was lost, and is in the
  // message. Else the first failed rank's code, or 128 + its signal.
  int exit_code = 0;
  // Empty if no rank failed. With kStop, which one failed first and how: "rank 1 was killed by SIGSEGV", and whether
  // the others were ended after it. With kContinue, all that failed, in their order, and what became of the others:
  // "rank 1 was killed by SIGKILL; the other ranks went on and ended well".
  std::string message;
  // With kStop: a rank failed, and others would have gone on, but were ended.
  bool has_ended_others = false;
};

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_LAUNCHER_H_
