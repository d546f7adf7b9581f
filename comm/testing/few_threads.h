// A limit of the threads that this process can start, such as that of a user or of a container.
//
//   LetThreadsStart(3);   // the fourth std::thread fails with EAGAIN
//   LetThreadsStart(-1);  // all start again
//
// A program that links this has its pthread_create.

#ifndef EVENKEEL_COMM_TESTING_FEW_THREADS_H_
#define EVENKEEL_COMM_TESTING_FEW_THREADS_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace evenkeel {

void LetThreadsStart(int count);

// Calls `run` while 0, 1, 2, ... threads can start, until it succeeds, and returns that number; at
// most kMostThreads. `check` gets the errors of those that fail.
inline constexpr int kMostThreads = 100;
int ThreadsNeeded(absl::FunctionRef<absl::Status()> run,
                  absl::FunctionRef<void(int threads, const absl::Status&)> check);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TESTING_FEW_THREADS_H_
