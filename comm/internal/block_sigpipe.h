// Keeps a write to a closed connection from ending the process, for libraries that write without MSG_NOSIGNAL.
//
//   const BlockSigpipe block;
//   third_party_that_writes();       // gets EPIPE; threads that it starts inherit the block
//
// The signal goes to the thread that writes, so blocking it there is enough, and nobody else's handler is touched.
//
// Threads: lives and dies on one thread.

#ifndef EVENKEEL_COMM_INTERNAL_BLOCK_SIGPIPE_H_
#define EVENKEEL_COMM_INTERNAL_BLOCK_SIGPIPE_H_

#include <signal.h>
#include <time.h>

namespace evenkeel::internal {

class BlockSigpipe {
 public:
  BlockSigpipe() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &Sigpipe(), &before_);
  }
  ~BlockSigpipe() {
    const timespec at_once = {};
    if (!was_pending_) sigtimedwait(&Sigpipe(), nullptr, &at_once);  // Ours, if there is one.
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockSigpipe(const BlockSigpipe&) = delete;
  BlockSigpipe& operator=(const BlockSigpipe&) = delete;

 private:
  static const sigset_t& Sigpipe() {
    static const sigset_t set = [] {
      sigset_t only;
      sigemptyset(&only);
      sigaddset(&only, SIGPIPE);
      return only;
    }();
    return set;
  }

  sigset_t before_;
  bool was_pending_ = false;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_BLOCK_SIGPIPE_H_
