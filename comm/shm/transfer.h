// One rank's part in one collective over shared memory: advances as far as the other ranks allow,
// and never waits.
//
//   ShmTransfer transfer(lane, operation);
//   // again and again, while other ranks write to their seats
//   EK_ASSIGN_OR_RETURN(const ShmProgress progress, transfer.Advance(budget, stop));
//
// Ways of moving the data:
//   one shot  small reductions: each rank publishes its input, and reduces the inputs of all ranks;
//   staged    chunk by chunk: each rank puts what others need of its input into its ring of slots
//             (publish), reduces its piece of the chunk (reduce), and copies the others' results
//             (take). Of an input in registered memory, a rank publishes the location only;
//   stream    all_gather_v and all_to_all_v: a rank's chunks form a stream: the sizes of its parts,
//             then the parts for other ranks. The ranks learn the number of chunks from the
//             beginnings of all streams;
//   direct    all-reduce and reduce where all buffers are registered: blocks of each rank's share
//             are reduced from all buffers into all buffers, by any rank that is running.
//
// Each element is combined in rank order, by one rank or (one shot) by each rank in the same way,
// so results depend neither on the way nor on sizes.
//
// Threads: thread-compatible; `stop` may be set from any thread.

#ifndef EVENKEEL_COMM_SHM_TRANSFER_H_
#define EVENKEEL_COMM_SHM_TRANSFER_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/shm/arrival.h"
#include "evenkeel/comm/shm/lane.h"
#include "evenkeel/comm/shm/task.h"

namespace evenkeel::internal {

enum class ShmProgress {
  kBlocked,  // Until another rank's seat changes.
  kMoved,    // Blocked, too, but data was moved, or a state changed for which others may wait.
  kMore,     // There is something to move, but the budget is spent.
  kEnded,
};

// One of the ways. Its task and arrival must outlive it.
class ShmWay {
 public:
  virtual ~ShmWay() = default;
  // Publishes the first chunk, if it is small, before this rank is seen to have arrived.
  virtual absl::Status PublishEarly() { return absl::OkStatus(); }
  // Finds the other ranks' memory once all ranks have arrived; called again if it fails.
  virtual absl::Status Begin() { return absl::OkStatus(); }
  // Moves about `budget` bytes at most; with 0, only looks whether there is something to move
  // (kMore). Errors: two ranks' sizes differ; there is no memory.
  virtual absl::StatusOr<ShmProgress> Advance(int64_t budget, const std::atomic<bool>& stop) = 0;
  // Adds the chunks or blocks of the operation, which has ended, to the lane's totals.
  virtual void CountIn() = 0;
};
// Returns the way for an operation, as far as this rank knows it alone; null if no data is to move.
std::unique_ptr<ShmWay> MakeShmWay(const ShmTask& task, ShmArrival& arrival);
std::unique_ptr<ShmWay> MakeShmDirect(const ShmTask& task, ShmArrival& arrival);

// Only Advance() changes its state:
//   kComing   until this rank has described the operation in its seat, and published what is small;
//   kArrived  until all ranks have arrived and agree, and this rank has found their memory;
//   kMoving   until the operation ends, which depends on no further call of a rank's program.
class ShmTransfer {
 public:
  // Both must outlive it.
  ShmTransfer(ShmLane& lane, const Operation& operation);
  ShmTransfer(const ShmTransfer&) = delete;
  ShmTransfer& operator=(const ShmTransfer&) = delete;

  // Moves about `budget` bytes at most; with 0, the first 64 KiB at most. Errors: the ranks
  // disagree, or there is no memory; no further call may follow.
  absl::StatusOr<ShmProgress> Advance(int64_t budget, const std::atomic<bool>& stop);
  // Returns whether all ranks have joined the operation, so that each wait ends by itself.
  bool all_are_here() const { return state_ == State::kMoving; }

  // Keeps peers that may still run from writing to this rank's memory. Called after the end of the
  // transfer or of the group, when Advance() no longer runs; only the first call counts.
  void Fence() { arrival_.Fence(); }

 private:
  enum class State { kComing, kArrived, kMoving };

  absl::Status Arrive();
  absl::Status BeginWay();
  bool HasAnotherGivenUp() const;

  ShmTask task_;
  ShmArrival arrival_;
  std::unique_ptr<ShmWay> way_;
  State state_ = State::kComing;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_TRANSFER_H_
