// A handle of one asynchronous operation.
//
//   Work work = channel.AllReduce(gradient, ReduceOp::kSum);
//   ... compute something else ...
//   EK_RETURN_IF_ERROR(work.Wait());     // now `gradient` holds the sum
//
// Ownership: a handle owns no tensor: read the one that you passed in. The operation's buffers must live, and may not
//            be touched, until the operation has ended, also when nobody waits.
// Threads:   thread-safe; copies share one operation.
// Errors:    there is one status per operation, and Wait() gives it, every time. An operation that misses its deadline
//            ends its communicator, and with it everything else that is in flight.

#ifndef EVENKEEL_COMM_WORK_H_
#define EVENKEEL_COMM_WORK_H_

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

namespace internal {
class Waits;
struct Wait;
}  // namespace internal

class WorkState;

// What a backend lets threads that wait do in its place, where handing over to a thread of its own would take longer
// than the operation.
class WorkHelper {
 public:
  virtual ~WorkHelper() = default;
  // Moves the operation on, on the calling thread, which holds no locks of the library's. Returns when it has ended, or
  // at `until`, or when somebody else does this already.
  virtual void Help(absl::Time until) = 0;
};

// What a backend fulfils. Users hold a `Work`.
class WorkState {
 public:
  // `on_deadline` runs on a waiting thread when `deadline` has passed; it must end in Finish() being called.
  // `waits` keeps account of who waits, and `describe` says for what; null: nobody does.
  WorkState(absl::Time deadline, std::function<void()> on_deadline);
  WorkState(absl::Time deadline, std::function<void()> on_deadline, std::shared_ptr<internal::Waits> waits,
            std::function<internal::Wait()> describe);
  ~WorkState();

  // Ends the operation; only the first call counts. Runs `on_end`, wakes waiters, then runs the callbacks, all on this
  // thread.
  void Finish(absl::Status status);
  bool IsDone() const;
  absl::Status Wait();
  void OnDone(std::function<void(const absl::Status&)> callback);
  // Whether Finish() would run callbacks of users'. They may block on what a waiting thread holds, so a WorkHelper
  // lets the backend end such an operation. A callback that is registered while the operation ends may still run on the
  // waiting thread.
  bool HasCallbacks() const;

  absl::Time deadline() const { return deadline_; }
  // The next three are set before the work is handed out, or never.
  // Runs when the operation ends, before a waiter or IsDone() can see that; takes no locks but the library's own.
  std::function<void(const absl::Status&)> on_end;
  std::shared_ptr<WorkHelper> helper;
  // How a device backend orders a stream behind the operation. Without it OrderBefore() waits on the host.
  std::function<absl::Status(StreamRef)> order_before;

 private:
  const absl::Time deadline_;
  const std::function<void()> on_deadline_;
  const std::shared_ptr<internal::Waits> waits_;
  const std::function<internal::Wait()> describe_;
  std::atomic<bool> is_ending_ = false;
  mutable absl::Mutex mutex_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void(const absl::Status&)>> callbacks_ ABSL_GUARDED_BY(mutex_);
};

class Work {
 public:
  // An operation that has ended with `status`.
  explicit Work(absl::Status status = absl::OkStatus());
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  // Blocks this thread until the operation has ended, at most until its deadline.
  absl::Status Wait() const { return state_->Wait(); }
  bool IsDone() const { return state_->IsDone(); }

  // Lets work that is put on `stream` from now on see the operation's result, without blocking this thread where the
  // backend runs on a device; on the CPU the same as Wait(). A later failure still shows in Wait().
  absl::Status OrderBefore(StreamRef stream) const;

  // Calls `callback` once when the operation has ended, on the thread that ends it, or at once. It must not block.
  void OnDone(std::function<void(const absl::Status&)> callback) const { state_->OnDone(std::move(callback)); }

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_WORK_H_
