// Starts the ranks of a job as processes on this host, and ends them together, or lets those that are left go on.
//
//   absl::StatusOr<LaunchResult> result = Launch({.ranks = 4, .command = {"./my_program", "--epochs=3"}});
//   if (!result.ok()) return Fail(result.status());                       // it could not be started
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
//              are ended as with kStop. When any rank has ended, well or not, and all that are left are stopped
//              (SIGSTOP), they have just `patience`.
//
// A job that fails, with kContinue one of which no rank has ended well, can be started anew, all ranks of it: with
// another store, secret and port, and EVENKEEL_RESTART, 0 in the first attempt, one higher. So that a job that dies at
// once does not do it all day, there is a pause before, twice as long each time until an attempt has lived long. Who
// interrupts the job, during an attempt or a pause, ends it: nothing is started after that.
//
// Threads: blocking; call it from the main thread, before other threads are started: it blocks signals for a while.
// Errors:  InvalidArgument for a number of ranks below 1 or no command; NotFound if the program can't be executed;
//          Unavailable if a process or the store can't be made. A rank that fails is no error here, but in the result.

#ifndef EVENKEEL_TOOLS_LAUNCHER_H_
#define EVENKEEL_TOOLS_LAUNCHER_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

enum class OnFailure { kStop, kContinue };

// The job has failed and will be started anew.
struct Restart {
  int number = 0;  // 1: the first.
  absl::Duration pause;
  std::string why;  // The message of the attempt that failed.
};

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
  int max_restarts = 0;
  absl::Duration restart_pause = absl::Seconds(1);  // Before the first, and after an attempt that lived so long:
  absl::Duration long_life = absl::Seconds(10);
  absl::Duration longest_restart_pause = absl::Seconds(30);
  // Called before the pause, to say so, and to change `variables` for the next attempts. An error ends the job.
  std::function<absl::Status(const Restart&, std::map<std::string, std::string>& variables)> on_restart;
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
  // By SIGINT, SIGTERM or SIGHUP to this process.
  bool was_interrupted = false;
  // All of the above is about the last attempt; so many were made before it.
  int restarts = 0;
};

// How long to wait after an attempt that lived so long, when there was a pause before it (0: it was the first).
absl::Duration PauseAfter(absl::Duration lived, absl::Duration pause_before, const LaunchOptions& options);

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_LAUNCHER_H_
