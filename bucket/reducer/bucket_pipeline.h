// One step's buckets on their way: each goes through the rounds of its reduction, in index order
// within a round, none before the gate is open.
//
//   ready in any order  --BucketReady()-->  its turn, and the gate  --Open()-->  round 0  -->
//   round 1 ...  -->  OnReduced()  -->  Wait()
//
// The gate is the step's agreement: until all ranks' records are in, the divisor is unknown, and
// whether all ranks are about to reduce the same. The user's thread does not wait for it; the
// thread that opens the gate launches what has gathered.
//
// This class has the step's state, and returns the turn that comes next. One of three drivers
// (pipeline_drivers.cc) takes the turns:
//
//   host    On the CPU, for a reduction without a thread: the thread that makes a first round
//           possible launches it, and Wait() does the rest.
//   worker  On the CPU, for a reduction with a thread: that takes all turns, each as soon as it
//           can.
//   device  As host, on streams. Wait() waits for no device, but it may wait until the other ranks
//           have issued the same (Work::OrderBefore()): a control thread must not call it.
//
// Bucket: awaited -> ready -> launched in round 0, in round 1 ... -> reduced. A round takes buckets
//         in their order, so it is enough to count those that it has launched.
// Step:   closed until Open() and, if it waits for that, Skip(); then open until a turn has failed
//         (Fail()) or Close(). A turn begins only while it is open.
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
    bool waits_for_skips = false;  // The gate opens only when it is known which buckets stay.
    // With a worker, which lives until Close(), and the group's account of waiting threads.
    internal::WorkerThread* worker = nullptr;
    std::shared_ptr<internal::Waits> waits;
    // Without one, on the CPU: when buckets are reduced is exact in times(), also if backward hides
    // it.
    bool measures_ends = false;
  };
  // The arguments with which a bucket is sent.
  struct Ready {
    bool has_all = false;  // This rank has a gradient for all its parameters.
    Event packed;          // On a device: when its memory may be used.
  };

  // Returns one with the driver for this plan and worker.
  static std::shared_ptr<BucketPipeline> Create(Setup setup);
  explicit BucketPipeline(Setup setup);
  virtual ~BucketPipeline() = default;

  // In the order of their moments `packed`.
  void BucketReady(int bucket, const Ready& ready);
  // Lets buckets go; sums are to be multiplied by `scale`. Only the first call counts.
  void Open(double scale);
  // By bucket: no rank has anything for it, so it is not reduced, and its gradients are none. Only
  // the first call counts.
  void Skip(std::vector<bool> skipped);
  // Until Skip() has been called, which is about to be.
  void WaitForSkips();
  // For BucketTimes only: one more gradient of this step is there.
  void CountGradient() { gradients_.fetch_add(1, std::memory_order_relaxed); }

  // Waits for every bucket in order, and until it is known that all ranks have launched the same,
  // where the transport does not see to that; all must be ready and the gate open. After an error
  // the group is to be ended, then Close()d.
  virtual absl::Status Wait() = 0;
  // A late caller finds nothing to do: what the plan points to may go. Waits for the turn that the
  // worker is in.
  void Close();

  GradFate fate(int bucket) const;  // After Wait().
  bool has_all(int bucket) const;   // As it went out.
  // On a device, after Wait(): orders later work on `stream` after what the bucket went through
  // (the reduction of which gradients exist), without the host. Returns an error that is known
  // already.
  absl::Status FollowBucket(int bucket, StreamRef stream) const;
  absl::Status FollowUsed(StreamRef stream) const;
  std::vector<Work> works() const;  // All that were issued.
  std::vector<BucketTimes> times() const;

 protected:
  // A bucket's next round, or the used flags. The round behind the last one is OnReduced().
  struct Turn {
    static constexpr int kUsedFlags = -1;
    bool is_used_flags() const { return bucket == kUsedFlags; }

    int bucket = kUsedFlags;
    int round = 0;
    bool is_skipped = false;
    ReductionStep step;
    Event input;  // On a device: the moment when the turn's input is there.
  };
  struct Reduced {
    GradFate fate = GradFate::kNone;
    Event end;  // On a device, if the reduction puts work there.
  };

  // The driver. Takes the turns that have become possible, on the thread that made them so, or has
  // them taken.
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
  // The number of buckets that have had their turn of that round.
  size_t progress(int round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return round < rounds() ? works_[round].size() : reduced_.size();
  }
  // By bucket, of those that are launched in the round.
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

  // Turns, which need no lock. A launch on a device sets `input` to that of its collective.
  absl::StatusOr<Work> Launch(Turn& turn) const;
  absl::StatusOr<Reduced> Reduce(Turn turn) const;
  // Their results; NoteLaunch() comes before a launch.
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
  std::optional<Work> used_ ABSL_GUARDED_BY(mutex_);              // Once it is launched.
  // By round; each begins when its last bucket is launched.
  std::vector<Work> comparisons_ ABSL_GUARDED_BY(mutex_);
  std::vector<Reduced> reduced_ ABSL_GUARDED_BY(mutex_);  // By bucket, of reduced ones.
  std::vector<BucketTimes> times_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_
