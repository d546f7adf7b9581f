#include "evenkeel/comm/base/worker_thread.h"

#include <utility>

#include "evenkeel/comm/base/librarys_thread.h"

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

void WorkerThread::Post(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  if (!thread_.joinable() && !is_ending_) thread_ = std::thread([this] { Run(); });
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
