// Starts a device's operations in one order on every rank: the one that launch_order.h makes on
// rank 0.
//
//   LaunchQueue queue(control, "nccl world");
//   queue.Push(RequestOf(operation, rank, layout), [&](const LaunchQueue::Turn& turn) {
//     if (turn.status.ok()) Launch(operation);          // on the queue's thread
//   });
//
// Channels promise no order among each other, and ranks may interleave them differently; a device's
// collectives deadlock, or meet the wrong one, if they are launched so. Each rank tells rank 0,
// over the control plane, what it has issued, and rank 0 tells those that take part when all of
// them have. A group of one asks nobody.
//
// Order:   the operations of one channel are pushed in sequence order.
// Threads: thread-safe. Launches run one at a time.
// Errors:  each launch is called exactly once: with OK in its turn; with the cause once the queue
//          or the control channel has ended. Ranks that disagree end the group, with who is where:
//          FailedPrecondition.

#ifndef EVENKEEL_COMM_NCCL_LAUNCH_QUEUE_H_
#define EVENKEEL_COMM_NCCL_LAUNCH_QUEUE_H_

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/nccl/launch_order.h"

namespace evenkeel::internal {

class LaunchQueue {
 public:
  struct Turn {
    absl::Status status;
    bool is_alike = true;  // All ranks' parts have the same layout.
  };
  using Launch = std::function<void(const Turn& turn)>;

  // `topic`: unique in the group, equal on all ranks. `control` must outlive this.
  LaunchQueue(ControlChannel& control, absl::string_view topic);
  // `control` is closed by then: another rank's next word could be waited for otherwise.
  ~LaunchQueue();

  void Push(const LaunchRequest& request, Launch launch);
  // Ends everything that has not had its turn, and everything later, with `why`.
  void Abort(const absl::Status& why);

 private:
  void RunLaunches();
  // On rank 0: what the others say.
  void RunRequests();
  void Arrive(int rank, const LaunchRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<LaunchTurn> NextTurn();

  ControlChannel& control_;
  const std::string requests_;  // The topic of what goes to rank 0,
  const std::string turns_;     // and of what comes from it.
  absl::Mutex mutex_;
  std::map<LaunchKey, Launch> launches_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  // On rank 0.
  LaunchOrder order_ ABSL_GUARDED_BY(mutex_);
  bool has_disagreed_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<LaunchTurn> next_ ABSL_GUARDED_BY(mutex_);
  void Start(std::thread& thread, std::function<void()> body);

  std::thread request_thread_;
  std::thread launch_thread_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_LAUNCH_QUEUE_H_
