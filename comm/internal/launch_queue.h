// Starts a device's operations in one order on every rank, the order in which rank 0 has issued them.
//
//   LaunchQueue queue(control, "nccl world");
//   queue.Push(operation.what, operation.channel, operation.sequence, [&](const absl::Status& turn) {
//     if (turn.ok()) Launch(operation);          // on the queue's thread
//   });
//
// Channels promise no order among each other, and ranks may interleave them differently; a device's collectives
// deadlock, or meet the wrong one, if they are launched so. Rank 0 tells the others, over the control plane, what it
// launches: which is also where ranks find out that they disagree, because the transport carries no header.
//
// Order:   the operations of one channel are pushed in sequence order.
// Threads: thread-safe. Launches run one at a time.
// Errors:  each launch is called exactly once: with OK in its turn; with FailedPrecondition that names both ranks if
// this
//          rank has another collective at that place; with the cause once the queue or the control channel has ended.

#ifndef EVENKEEL_COMM_INTERNAL_LAUNCH_QUEUE_H_
#define EVENKEEL_COMM_INTERNAL_LAUNCH_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control.h"

namespace evenkeel::internal {

class LaunchQueue {
 public:
  using Launch = std::function<void(const absl::Status& turn)>;

  // `topic`: unique in the group, equal on all ranks. `control` must outlive this.
  LaunchQueue(ControlChannel& control, absl::string_view topic);
  // `control` is closed by then: rank 0's next word could be waited for otherwise.
  ~LaunchQueue();

  void Push(const Collective& what, uint64_t channel, int64_t sequence, Launch launch);
  // Ends everything that has not had its turn, and everything later, with `why`.
  void Abort(const absl::Status& why);

 private:
  struct Entry {
    Collective what;
    uint64_t channel = 0;
    int64_t sequence = 0;
    Launch launch;
  };

  void Run();
  // The next operation by rank 0's order, which on rank 0 is the order of Push(). An error: the queue has ended.
  absl::StatusOr<Entry> NextOfRankZero();
  absl::StatusOr<Entry> NextAsRankZeroSays();
  absl::StatusOr<Entry> Take(const std::function<bool(const Entry&)>& wanted);

  ControlChannel& control_;
  const std::string topic_;
  absl::Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_LAUNCH_QUEUE_H_
