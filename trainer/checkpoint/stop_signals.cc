#include "evenkeel/trainer/checkpoint/stop_signals.h"

#include <signal.h>

#include <atomic>
#include <iostream>
#include <thread>

#include "absl/status/statusor.h"
#include "evenkeel/comm/base/start_thread.h"

namespace evenkeel {
namespace {

std::atomic<bool> is_deferred = false;
std::atomic<int> first_signal = 0;

// A separate thread takes the signals, so that no other one is interrupted: generated compute
// kernels may use the memory below their stack pointer, where a handler's frame would lie.
void Take(const sigset_t& signals) {
  int number = 0;
  sigwait(&signals, &number);
  if (is_deferred) {
    first_signal = number;
    sigwait(&signals, &number);
  }
  signal(number, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  raise(number);
}

}  // namespace

void WatchStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int number : {SIGTERM, SIGINT}) sigaddset(&signals, number);
  pthread_sigmask(SIG_BLOCK, &signals,
                  nullptr);  // Threads that are started from now on inherit it.
  absl::StatusOr<std::thread> thread =
      internal::StartThread("the signals that stop a run", [signals] { Take(signals); });
  if (thread.ok()) return thread->detach();
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  std::cerr << thread.status().message()
            << "; SIGTERM and SIGINT end this run without a checkpoint\n";
}

void DeferStopSignals() { is_deferred = true; }

int StopSignal() { return first_signal; }

}  // namespace evenkeel
