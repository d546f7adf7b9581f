// One step's pipeline of buckets: each bucket goes through the rounds of its reduction, in index
// order within a round, and not before the gate is open.
//
//   ready in any order  --BucketReady()-->  its turn, and the gate  --Open()-->  round 0  -->
//   round 1 ...  -->  OnReduced()  -->  Wait()
//
// The gate is the step's agreement: until all ranks' records have arrived, neither the divisor is
// known, nor whether all ranks will reduce the same. The user's thread does not wait for the gate;
// the thread that opens it launches the buckets that are ready.
//
// This class keeps the step's state, and returns the next turn. One of three drivers
// (pipeline_drivers.cc) takes the turns:
//
//   host    On the CPU, for a reduction without a thread, which has one round: the thread that
//           makes a launch possible does it, and Wait() does the rest.
//   worker  On the CPU, for a reduction with a thread: this thread takes each turn as soon as it is
//           possible.
//   device  Like host, on streams, with any number of rounds. Wait() waits for no device, but may
//           wait until the other ranks have issued the same operations (Work::OrderBefore()): a
//           control thread must not call it.
//
// Bucket: awaited -> ready -> launched in round 0, in round 1 ... -> reduced. A round takes buckets
//         in their order, so a count of launched buckets per round is enough.
// Step:   not open until Open() and, with `waits_for_skips`, Skip(); then open until a turn has
//         failed (Fail()) or Close(). A turn begins only while the step is open.
// Threads: thread-safe. Drivers change the state with the lock, through this class.

#ifndef EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_
#define EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/reducer/plan_in_force.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/base/worker_thread.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

class BucketPipeline : public std::enable_shared_from_this<BucketPipeline> {
 public:
  struct Setup {
    std::shared_ptr<const PlanInForce> plan;  // Stays in force until Close().
    std::vector<bool> contributes;            // By bucket, whether this rank has something to add.
    bool waits_for_skips = false;             // The gate opens only after Skip(), too.
    // For a reduction with a thread: the worker, which lives until Close(), and the group's
    // register of waiting threads.
    internal::WorkerThread* worker = nullptr;
    std::shared_ptr<internal::Waits> waits;
    // Without a worker, on the CPU: times() has the exact ends of reductions, also of those that
    // backward hides.
    bool measures_ends = false;
  };
  // The facts about a bucket when it is ready.
  struct Ready {
    bool has_all = false;  // This rank has a gradient for all its parameters.
    Event packed;          // On a device: when its memory may be used.
  };

  // Returns a pipeline with the driver for this plan and worker.
  static std::shared_ptr<BucketPipeline> Create(Setup setup);
  explicit BucketPipeline(Setup setup);
  virtual ~BucketPipeline() = default;

  // Marks a bucket as ready. On a device, called in the order of the events `packed`.
  void BucketReady(int bucket, const Ready& ready);
  // Opens the gate; sums are multiplied by `scale`. Only the first call counts.
  void Open(double scale);
  // Sets, by bucket, whether it is skipped: no rank has a gradient for it, so it is not reduced,
  // and its gradients are none. Only the first call counts.
  void Skip(std::vector<bool> skipped);
  // Waits until Skip() has been called; the caller knows that this will happen soon.
  void WaitForSkips();
  // Counts a gradient of this step, for BucketTimes only.
  void CountGradient() { gradients_.fetch_add(1, std::memory_order_relaxed); }

  // Waits for every bucket in order and, where the transport does not ensure it, until it is known
  // that all ranks have launched the same operations. All buckets must be ready, and the gate open.
  // After an error, end the group, then call Close().
  virtual absl::Status Wait() = 0;
  // Ends the step: later calls have no effect, so the objects to which the plan points may be
  // destroyed. Waits for the worker's current turn.
  void Close();

  GradFate fate(int bucket) const;  // After Wait().
  bool has_all(int bucket) const;   // That of its Ready.
  // On a device, after Wait(): orders later work on `stream` after the bucket's reduction, or after
  // that of the used flags, without the host. Returns an error if one is known already.
  absl::Status FollowBucket(int bucket, StreamRef stream) const;
  absl::Status FollowUsed(StreamRef stream) const;
  std::vector<Work> works() const;  // All works that were issued.
  std::vector<BucketTimes> times() const;

 protected:
  // A bucket's next round, or the used flags. The round after the last one is OnReduced().
  struct Turn {
    static constexpr int kUsedFlags = -1;
    bool is_used_flags() const { return bucket == kUsedFlags; }

    int bucket = kUsedFlags;
    int round = 0;
    bool is_skipped = false;
    ReductionStep step;
    Event input;  // On a device: the event after which the turn's input is complete.
  };
  struct Reduced {
    GradFate fate = GradFate::kNone;
    Event end;  // On a device, if the reduction has work on streams.
  };

  // Implemented by the driver: takes the turns that have become possible, or has the worker take
  // them.
  virtual void GoOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Returns whether no other thread is in a turn.
  virtual bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return true; }

  const Setup& setup() const { return setup_; }
  int size() const { return static_cast<int>(plan_.buckets.size()); }
  int rounds() const { return static_cast<int>(plan_.channels.size()); }

  bool is_closed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_; }
  bool IsOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return has_scale_ && has_skips_ && !closed_ && failed_.ok();
  }
  // Returns the number of buckets whose turn of that round is done.
  size_t progress(int round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return round < rounds() ? works_[round].size() : reduced_.size();
  }
  // Returns the works of the buckets that are launched in the round, by bucket.
  const std::vector<Work>& launched(int round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return works_[round];
  }
  const std::optional<Work>& used_flags() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return used_;
  }
  bool NeedsUsedFlags() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return plan_.used.count > 0 && !used_.has_value();
  }
  Turn TurnOf(int bucket, int round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the first round, or the used flags, that can be launched now.
  std::optional<Turn> NextLaunch() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NeverLaunched() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Execute a turn, without the lock. A launch on a device sets `input` to that of its collective.
  absl::StatusOr<Work> Launch(Turn& turn) const;
  absl::StatusOr<Reduced> Reduce(Turn turn) const;
  // Record the results of turns; NoteLaunch() is called before a launch.
  void NoteLaunch(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteLaunched(const Turn& turn, const Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteEnd(int bucket, absl::Time end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    times_[bucket].reduced = end;
  }
  void NoteReduced(Reduced reduced) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    reduced_.push_back(std::move(reduced));
  }
  void Fail(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    failed_.Update(error);
  }
  const absl::Status& failed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return failed_; }
  // Waits until all ranks are known to have launched the same and, on the CPU, which gradients
  // exist.
  absl::Status WaitForTheLast() const ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;

 private:
  const Setup setup_;
  const PlanInForce& plan_;
  std::atomic<int> gradients_ = 0;

  bool has_scale_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_skips_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  double scale_ ABSL_GUARDED_BY(mutex_) = 1.0;
  std::vector<bool> skipped_ ABSL_GUARDED_BY(mutex_);  // Empty: none.

  std::vector<std::optional<Ready>> ready_ ABSL_GUARDED_BY(mutex_);
  int last_ready_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::vector<Work>> works_ ABSL_GUARDED_BY(mutex_);  // By round, of launched buckets.
  std::optional<Work> used_ ABSL_GUARDED_BY(mutex_);              // Once launched.
  // By round; each begins when its last bucket is launched.
  std::vector<Work> comparisons_ ABSL_GUARDED_BY(mutex_);
  std::vector<Reduced> reduced_ ABSL_GUARDED_BY(mutex_);  // By bucket, of reduced ones.
  std::vector<BucketTimes> times_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_
