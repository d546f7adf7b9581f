#include "evenkeel/trainer/checkpoint/stop_signals.h"

#include <signal.h>

#include <atomic>

namespace evenkeel {
namespace {

std::atomic<int> first_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler writes it");

void OnStopSignal(int number) {
  int none = 0;
  if (first_signal.compare_exchange_strong(none, number)) return;
  signal(number, SIG_DFL);
  raise(number);  // Comes when this handler returns.
}

}  // namespace

void WatchStopSignals() {
  struct sigaction action = {};
  action.sa_handler = OnStopSignal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int number : {SIGTERM, SIGINT}) sigaction(number, &action, nullptr);
}

int StopSignal() { return first_signal; }

}  // namespace evenkeel
