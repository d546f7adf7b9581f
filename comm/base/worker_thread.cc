#include "evenkeel/comm/base/worker_thread.h"

#include <utility>

#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

WorkerThread::~WorkerThread() {
  std::thread thread;
  {
    absl::MutexLock lock(&mutex_);
    is_ending_ = true;
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
}

absl::Status WorkerThread::Post(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (!thread_.joinable() && !is_ending_) {
    EK_ASSIGN_OR_RETURN(thread_, StartThread("tasks", [this] { Run(); }));
  }
  tasks_.push_back(std::move(task));
  return absl::OkStatus();
}

void WorkerThread::Run() {
  ThisThreadIsTheLibrarys();
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_news = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return is_ending_ || !tasks_.empty();
      };
      mutex_.Await(absl::Condition(&has_news));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace evenkeel::internal
