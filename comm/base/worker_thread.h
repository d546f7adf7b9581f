// A thread of the library's own that runs what it is given, in order. It starts with the first
// task.
//
//   WorkerThread worker;
//   worker.Post([pipeline] { pipeline->Advance(); });
//
// Threads: Post() from any thread. The destructor runs what was posted, also by the tasks that it
//          runs, and must not be called by a task.

#ifndef EVENKEEL_COMM_BASE_WORKER_THREAD_H_
#define EVENKEEL_COMM_BASE_WORKER_THREAD_H_

#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace evenkeel::internal {

class WorkerThread {
 public:
  WorkerThread() = default;
  ~WorkerThread();
  WorkerThread(const WorkerThread&) = delete;
  WorkerThread& operator=(const WorkerThread&) = delete;

  // ResourceExhausted: the thread cannot start, and the task is dropped.
  absl::Status Post(std::function<void()> task);

 private:
  void Run();

  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_WORKER_THREAD_H_
