#include "evenkeel/comm/work.h"

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"

namespace evenkeel {
namespace {

constexpr absl::Duration kShortWait = absl::Microseconds(20);

}  // namespace

WorkState::WorkState(absl::Time deadline, std::function<void()> on_deadline)
    : WorkState(deadline, std::move(on_deadline), nullptr, nullptr) {}

WorkState::WorkState(absl::Time deadline, std::function<void()> on_deadline,
                     std::shared_ptr<internal::Waits> waits,
                     std::function<internal::Wait()> describe)
    : deadline_(deadline),
      on_deadline_(std::move(on_deadline)),
      waits_(std::move(waits)),
      describe_(std::move(describe)) {}

WorkState::~WorkState() = default;

void WorkState::Finish(absl::Status status) {
  if (is_ending_.exchange(true)) return;
  const internal::Waits::Callbacks account(waits_);
  internal::LibrarysTurn turn;
  // Before the operation counts as done: a waiting thread that sees the failure may abort the group
  // at once, and the group's status must be the cause, not that abort.
  if (on_end) status = on_end(std::move(status));
  std::vector<std::function<void(const absl::Status&)>> callbacks;
  {
    absl::MutexLock lock(&mutex_);
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

bool WorkState::AwaitDone(absl::Time deadline) const {
  absl::MutexLock lock(&mutex_);
  return AwaitUntil(mutex_, absl::Condition(&done_), deadline);
}

bool WorkState::HasCallbacks() const {
  absl::MutexLock lock(&mutex_);
  return !callbacks_.empty();
}

absl::Status WorkState::Wait() {
  {
    absl::MutexLock lock(&mutex_);
    if (done_) return status_;
  }
  const internal::CountedWait counted;
  if (helper != nullptr) {
    helper->Help(SteadyNow() + kShortWait);  // A wait this short is not recorded.
    absl::MutexLock lock(&mutex_);
    if (done_) return status_;
  }
  internal::Waits::Scope scope(waits_, describe_, [this] { return IsDone(); });
  if (helper != nullptr) helper->Help(deadline_);
  {
    absl::MutexLock lock(&mutex_);
    if (AwaitUntil(mutex_, absl::Condition(&done_), deadline_)) return status_;
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

Work::Work(absl::Status status)
    : state_(std::make_shared<WorkState>(absl::InfiniteFuture(), nullptr)) {
  state_->Finish(std::move(status));
}

absl::Status Work::OrderBefore(StreamRef stream) const {
  if (state_->order_before && !state_->IsDone()) return state_->order_before(stream);
  return state_->Wait();
}

}  // namespace evenkeel
