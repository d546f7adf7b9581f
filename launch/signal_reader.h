// Reads the signals that a launcher handles: SIGCHLD, SIGINT, SIGTERM, SIGHUP and SIGUSR1.
//
//   SignalReader signals;                                  // blocks them until its end
//   if (!signals.is_valid()) return Fail(strerror(errno));
//   for (int signal : signals.Wait(deadline)) ...  // those that came; SIGCHLD only ends the wait
//
// Signals that come between two calls of Wait() are kept for the next one.
//
// Threads: thread-compatible; made before other threads are, which then have the signals blocked,
//          too.

#ifndef EVENKEEL_LAUNCH_SIGNAL_READER_H_
#define EVENKEEL_LAUNCH_SIGNAL_READER_H_

#include <signal.h>

#include <vector>

#include "absl/time/time.h"

namespace evenkeel {

class SignalReader {
 public:
  SignalReader();
  ~SignalReader();
  SignalReader(const SignalReader&) = delete;
  SignalReader& operator=(const SignalReader&) = delete;

  bool is_valid() const { return fd_ >= 0; }
  // The mask of before, for children.
  const sigset_t& before() const { return before_; }

  // Waits until there are signals or a child has ended, at most until `deadline` or for a second.
  std::vector<int> Wait(absl::Time deadline);

 private:
  sigset_t mask_;
  sigset_t before_;
  struct sigaction child_before_;
  int fd_ = -1;
};

}  // namespace evenkeel

#endif  // EVENKEEL_LAUNCH_SIGNAL_READER_H_
