#include "evenkeel/comm/work.h"

namespace evenkeel {

void WorkState::Finish(absl::Status status) {
  std::vector<std::function<void(const absl::Status&)>> callbacks;
  {
    absl::MutexLock lock(&mutex_);
    if (done_) return;
    done_ = true;
    status_ = status;
    callbacks.swap(callbacks_);
  }
  for (const auto& callback : callbacks) callback(status);
}

bool WorkState::IsDone() const {
  absl::MutexLock lock(&mutex_);
  return done_;
}

absl::Status WorkState::Wait() {
  {
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithDeadline(absl::Condition(&done_), deadline_)) return status_;
  }
  if (on_deadline_) on_deadline_();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&done_));
  return status_;
}

void WorkState::OnDone(std::function<void(const absl::Status&)> callback) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
    status = status_;
  }
  callback(status);
}

Work::Work(absl::Status status) : state_(std::make_shared<WorkState>(absl::InfiniteFuture(), nullptr)) {
  state_->Finish(std::move(status));
}

absl::Status Work::OrderBefore(StreamRef stream) const {
  if (state_->order_before && !state_->IsDone()) return state_->order_before(stream);
  return state_->Wait();
}

}  // namespace evenkeel
