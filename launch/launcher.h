// Starts the ranks of a job as processes on this host, and ends them together, or lets the
// remaining ones continue.
//
//   absl::StatusOr<LaunchResult> result =
//       Launch({.ranks = 4, .command = {"./my_program", "--epochs=3"}});
//   if (!result.ok()) return Fail(result.status());  // it could not be started
//   // "rank 1 was killed by SIGSEGV"
//   if (!result->message.empty()) std::cerr << result->message << "\n";
//   return result->exit_code;
//
// Each rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// and a free MASTER_PORT, for programs whose rank 0 wants to listen there), the address of a store
// that this process hosts, and a fresh secret. The secret is passed in the environment, which only
// the same user can read, as with a file, and nothing is left to clean up when this process is
// killed.
//
// Ranks form a process group of their own, so that a terminal's Ctrl-C reaches them once, through
// this process. It forwards SIGINT, SIGTERM and SIGHUP: after the first one the ranks may take
// their time (for example to save); the second one kills. Every SIGUSR1 is forwarded: ranks that
// handle it (comm/flight_signal.h) write their flight record. Their standard input is /dev/null. If
// this process is killed, the kernel kills them.
//
// A rank fails when a signal kills it or its exit code is not 0. What then happens to the others:
//   kStop      they have `patience` to end by themselves, with their own message; then they get
//              SIGTERM, and after that SIGKILL.
//   kContinue  nothing: the store stays up until the last rank has ended, so that the survivors can
//              make a new group (join/recovery.h). A failed rank is not restarted. When a rank
//              has ended well, the job is done: the others have `last_patience`, again after each
//              further rank that ends well; then they are ended as with kStop. When any rank has
//              ended, with or without success, and all others are stopped (SIGSTOP), they have only
//              `patience`.
//   kReplace   as kContinue, and a new process takes the place of a rank that fails, once all ranks
//              have met and until one has ended well (docs/replacement.md). EVENKEEL_NEWCOMER is
//              the number of the process among those of this rank. The first one starts at once; a
//              pause grows while they fail within `short_life`. After `most_failures` such failures
//              in a row for which the program is to blame, the others continue without the rank. A
//              rank that the group has declared lost (stopped, cut off) is killed first, as long
//              as the group has all its ranks. If no rank of the group is left, the job ends.
//
// A job that fails (with kContinue: none of its ranks has ended well) can be restarted, all its
// ranks, with another store, secret and port. EVENKEEL_RESTART is 0 in the first attempt, and grows
// by one. A pause precedes each restart, and doubles until an attempt has lived long, so that a job
// that dies at once is not restarted all day. An interrupt during an attempt or a pause ends the
// job: no attempt follows.
//
// Threads: blocking; call it from the main thread, before other threads are started: it blocks
//          signals for a while.
// Errors:  InvalidArgument for a number of ranks below 1 or no command; NotFound if the program
//          can't be executed; Unavailable if a process or the store can't be made. A rank that
//          fails is not an error; the result reports it.

#ifndef EVENKEEL_LAUNCH_LAUNCHER_H_
#define EVENKEEL_LAUNCH_LAUNCHER_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

enum class OnFailure { kStop, kContinue, kReplace };

// The job has failed and will be restarted.
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
  // With kContinue, before SIGTERM for ranks that have not ended after another one has ended well.
  absl::Duration last_patience = absl::Seconds(60);
  // With kReplace: processes in the places of failed ranks, in all.
  int max_replacements = 1000;
  absl::Duration short_life = absl::Seconds(1);
  int most_failures = 3;
  int max_restarts = 0;
  absl::Duration restart_pause =
      absl::Seconds(1);  // Before the first, and after an attempt that lived so long:
  absl::Duration long_life = absl::Seconds(10);
  absl::Duration longest_restart_pause = absl::Seconds(30);
  // Called in each attempt before its ranks start, with the address of its store and its secret,
  // which a TcpObserver needs. An error ends the job.
  std::function<absl::Status(const std::string& store, const std::string& secret)> on_store;
  // Called before the pause, to say so, and to change `variables` for the next attempts. An error
  // ends the job.
  std::function<absl::Status(const Restart&, std::map<std::string, std::string>& variables)>
      on_restart;
};

struct LaunchResult {
  // 0 if all ranks ended well, and with kContinue also if at least one did: each of the others was
  // lost, and is in the message. Else the exit code of the message's first rank, or 128 + its
  // signal.
  int exit_code = 0;
  // Empty if no rank failed. With kStop, which one failed and how, "rank 1 was killed by SIGSEGV",
  // and whether the others were ended after it. If several failed, it is a rank that the error of
  // the group "world" names (the last one, if the ranks made it again) and that ended by itself;
  // else one that was killed within half a second of the first failure; else the first. A rank that
  // was killed is added. With kContinue, all that failed, in their order, and what became of the
  // others: "rank 1 was killed by SIGKILL; the other ranks went on and ended well".
  std::string message;
  // A rank that is in the message was killed by a signal.
  bool by_signal = false;
  // With kStop: a rank failed, and others would have gone on, but were ended.
  bool has_ended_others = false;
  // By SIGINT, SIGTERM or SIGHUP to this process.
  bool was_interrupted = false;
  // With kReplace, the processes that were started in the places of failed ranks.
  int replacements = 0;
  // All of the above is about the last attempt; so many were made before it.
  int restarts = 0;
};

// How long to wait after an attempt that lived so long, when there was a pause before it (0: it was
// the first).
absl::Duration PauseAfter(absl::Duration lived, absl::Duration pause_before,
                          const LaunchOptions& options);

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

// Returns the path of this program, for ranks that run it too. argv[0] may name a different one:
// the program may have been found through PATH, or from another folder.
std::string OwnPath();

}  // namespace evenkeel

#endif  // EVENKEEL_LAUNCH_LAUNCHER_H_
