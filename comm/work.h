// A handle to an asynchronous operation.
//
//   Work work = channel.AllReduce(gradient, ReduceOp::kSum);
//   ... compute something else ...
//   EK_RETURN_IF_ERROR(work.Wait());     // now `gradient` holds the sum
//
// Ownership: a handle owns no tensor. The operation's buffers must live, and must not be accessed,
//            until the operation has ended, whether or not a thread waits for it.
// Threads:   thread-safe; copies share one operation.
// Errors:    Wait() returns the status of the operation, on every call. An operation that misses
//            its deadline ends its communicator with all that is in flight.

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

// Lets waiting threads do a backend's work, where a handover to another thread would take longer
// than the operation.
class WorkHelper {
 public:
  virtual ~WorkHelper() = default;
  // Advances the operation on the calling thread, which holds no locks of the library. Returns when
  // the operation has ended, at `until`, or when another thread advances it already.
  virtual void Help(absl::Time until) = 0;
};

// The backend's side of an operation. Users hold a `Work`.
class WorkState {
 public:
  // `on_deadline` runs on a waiting thread when `deadline`, a time of SteadyNow(), has passed; it
  // must lead to Finish().
  // `waits` records the waiting threads, with the text of `describe`; null: no record.
  WorkState(absl::Time deadline, std::function<void()> on_deadline);
  WorkState(absl::Time deadline, std::function<void()> on_deadline,
            std::shared_ptr<internal::Waits> waits, std::function<internal::Wait()> describe);
  ~WorkState();

  // Ends the operation; only the first call counts. Runs `on_end`, wakes waiters, then runs the
  // callbacks, all on this thread.
  void Finish(absl::Status status);
  bool IsDone() const;
  absl::Status Wait();
  bool AwaitDone(absl::Time deadline) const;
  void OnDone(std::function<void(const absl::Status&)> callback);
  // Returns whether Finish() would run callbacks of users. Those may block on a lock of a waiting
  // thread, so a WorkHelper leaves the end of such an operation to the backend. A callback that is
  // registered while the operation ends may still run on the waiting thread.
  bool HasCallbacks() const;

  absl::Time deadline() const { return deadline_; }
  // The next three are set before the work is handed out, or never. `on_end` runs when the
  // operation ends, before Wait() or IsDone() see it, and takes only locks of the library. It
  // returns the status that the operation is to have.
  std::function<absl::Status(absl::Status)> on_end;
  std::shared_ptr<WorkHelper> helper;
  // Orders a stream of a device behind the operation. If unset, OrderBefore() waits on the host.
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
  // Makes the handle of an operation that has ended with `status`.
  explicit Work(absl::Status status = absl::OkStatus());
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  // Blocks this thread until the operation has ended, at most until its deadline.
  absl::Status Wait() const { return state_->Wait(); }
  bool IsDone() const { return state_->IsDone(); }
  // Blocks this thread until the operation has ended, at most until `deadline`, a time of
  // SteadyNow(). Returns whether it has ended. The operation's own deadline has no effect.
  bool AwaitDone(absl::Time deadline) const { return state_->AwaitDone(deadline); }

  // Orders all later work on `stream` after the operation, without blocking this thread on a
  // device; on the CPU the same as Wait(). Wait() still reports a later failure.
  absl::Status OrderBefore(StreamRef stream) const;

  // Calls `callback` once, on the thread that ends the operation, or at once if it has ended. The
  // callback must not block.
  void OnDone(std::function<void(const absl::Status&)> callback) const {
    state_->OnDone(std::move(callback));
  }

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_WORK_H_
