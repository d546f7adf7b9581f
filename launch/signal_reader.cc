#include "evenkeel/launch/signal_reader.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>

#include "evenkeel/comm/base/clock.h"

namespace evenkeel {

SignalReader::SignalReader() {
  sigemptyset(&mask_);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&mask_, signal);
  sigprocmask(SIG_BLOCK, &mask_, &before_);
  struct sigaction by_default = {};
  by_default.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &by_default,
            &child_before_);  // Where it is ignored, nobody learns how a child has ended.
  fd_ = signalfd(-1, &mask_, SFD_CLOEXEC | SFD_NONBLOCK);
}

SignalReader::~SignalReader() {
  if (fd_ >= 0) close(fd_);
  sigaction(SIGCHLD, &child_before_, nullptr);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

std::vector<int> SignalReader::Wait(absl::Time deadline) {
  pollfd poll_fd{.fd = fd_, .events = POLLIN, .revents = 0};
  // A second at most: a child that ends between two looks is found even if its signal merged with
  //                   another one.
  const absl::Duration left =
      std::clamp(deadline - SteadyNow(), absl::ZeroDuration(), absl::Seconds(1));
  poll(&poll_fd, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
  std::vector<int> signals;
  signalfd_siginfo info;
  while (read(fd_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGCHLD) signals.push_back(static_cast<int>(info.ssi_signo));
  }
  return signals;
}

}  // namespace evenkeel
