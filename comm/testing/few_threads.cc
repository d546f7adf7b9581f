#include "evenkeel/comm/testing/few_threads.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>

namespace evenkeel {
namespace {

// The number of threads that still start; -1: all.
std::atomic<int> threads_left = -1;

}  // namespace

void LetThreadsStart(int count) { threads_left = count; }

int ThreadsNeeded(absl::FunctionRef<absl::Status()> run,
                  absl::FunctionRef<void(int, const absl::Status&)> check) {
  for (int threads = 0; threads < kMostThreads; ++threads) {
    LetThreadsStart(threads);
    const absl::Status status = run();
    LetThreadsStart(-1);
    if (status.ok()) return threads;
    check(threads, status);
  }
  return kMostThreads;
}

}  // namespace evenkeel

// Found before the C library's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  static const auto original =
      reinterpret_cast<decltype(&::pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  std::atomic<int>& left = evenkeel::threads_left;
  int seen = left;
  while (seen > 0 && !left.compare_exchange_weak(seen, seen - 1)) {
  }
  if (seen == 0) return EAGAIN;
  return original(thread, attributes, body, argument);
}
