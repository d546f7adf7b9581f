// One step's buckets on their way: each goes through the rounds of its reduction, in index order
// within a round, none before the gate is open.
//
//   ready in any order  --BucketReady()-->  its turn, and the gate  --Open()-->  round 0  -->
//   round 1 ...  -->  OnReduced()  -->  Wait()
//
// The gate is the step's agreement: until all ranks' records are in, nobody knows the divisor, or
// that all ranks are about to reduce the same. The user's thread does not wait for it; whoever
// opens the gate launches what has gathered.
//
// A reduction that wants a thread gets the worker: there everything happens as soon as it can.
// Without one, first rounds are launched by whoever makes that possible, and the rest is done by
// Wait().
//
// On a device first rounds are put on streams as soon as buckets go out, by whoever makes that
// possible; Wait() puts the rest there. It waits for no device, but it may until the other ranks
// have issued the same (Work::OrderBefore()): so it is nothing for the threads that bring their
// word. FollowBucket() orders a stream behind a bucket's end.
//
// Threads: thread-safe.

#ifndef EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_
#define EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
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
  // The arguments with which a bucket is sent.
  struct Ready {
    bool has_all = false;  // This rank has a gradient for all its parameters.
    Event packed;          // On a device: when its memory may be used.
  };

  // `contributes`: by bucket, whether this rank has something to add. `waits_for_skips`: the gate
  // opens only once it is known which buckets stay. `waits`: the group's account of who waits, with
  // a worker only. The plan stays in force, and the worker lives, until Close().
  BucketPipeline(std::shared_ptr<const PlanInForce> plan, std::vector<bool> contributes,
                 bool waits_for_skips, internal::WorkerThread* worker,
                 std::shared_ptr<internal::Waits> waits);

  // In the order of their moments `packed`.
  void BucketReady(int bucket, const Ready& ready);
  // Lets buckets go; sums are to be multiplied by `scale`. Only the first call counts.
  void Open(double scale);
  // By bucket: no rank has anything for it, so it is not reduced, and its gradients are none. Only
  // the first call counts.
  void Skip(std::vector<bool> skipped);
  // Until Skip() has been called, which is about to be.
  void WaitForSkips();
  // For BucketTimes only: one more gradient of this step is there; and when buckets are reduced is
  // to be exact, also without a worker. Before the first is ready.
  void CountGradient() { gradients_.fetch_add(1, std::memory_order_relaxed); }
  void MeasureEnds();

  // Waits for every bucket in order, and until it is known that all ranks have launched the same,
  // where the transport does not see to that; all must be ready and the gate open. After an error
  // the group is to be ended, then Close()d.
  absl::Status Wait();
  // Whoever comes late finds nothing to do: what the plan points to may go. Waits for what the
  // worker is about.
  void Close();

  GradFate fate(int bucket) const;  // After Wait().
  bool has_all(int bucket) const;   // As it went out.
  // On a device, after Wait(): what comes on `stream` from now on follows what the bucket went
  // through (the reduction of which gradients exist), without the host. An error that is known
  // already is the answer.
  absl::Status FollowBucket(int bucket, StreamRef stream) const;
  absl::Status FollowUsed(StreamRef stream) const;
  std::vector<Work> works() const;  // All that were issued.
  std::vector<BucketTimes> times() const;

 private:
  // The next possible action.
  struct Turn {
    enum class Kind { kNothing, kRound, kUsed, kReduced } kind = Kind::kNothing;
    int bucket = 0;
    int round = 0;
    bool is_skipped = false;
    bool has_all = false;
    std::optional<Work> before = std::nullopt;  // The previous round's; it has ended.
  };

  int size() const { return static_cast<int>(plan_->buckets.size()); }
  int rounds() const { return static_cast<int>(plan_->channels.size()); }
  Turn NextTurn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Turn NextLaunch() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // A first round, or the used flags.
  ReductionStep StepOf(int bucket, bool has_all, double scale) const {
    return {.scale = scale, .contributes = contributes_[bucket], .has_all = has_all};
  }
  bool IsOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return has_scale_ && has_skips_ && !closed_ && failed_.ok();
  }
  bool IsSkipped(int bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !skipped_.empty() && skipped_[bucket];
  }
  // `before`: on a device, after what it begins; becomes the moment when its input is there.
  absl::StatusOr<Work> Launch(const Turn& turn, double scale, Event* before) const;
  absl::StatusOr<Work> Issue(int bucket, int round, ReductionStep step, Event* before) const;
  absl::StatusOr<GradFate> Reduced(int bucket, ReductionStep step, const Work& work,
                                   const Event& before, Event* reduced) const;
  void NoteLaunched(const Turn& turn, const Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteEndOf(const Turn& turn, const Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteTime(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsFinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Without a worker.
  void LaunchReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FinishOnDevice() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FinishHere() ABSL_LOCKS_EXCLUDED(mutex_);
  // With one: has it look at what can be done; what it does then.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WaitForWorker() ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<Work> OldestInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Until all ranks are known to have launched the same and, on the CPU, which gradients exist.
  absl::Status WaitForTheLast() ABSL_LOCKS_EXCLUDED(mutex_);

  // On whoever made something possible.
  void GoOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { worker_ != nullptr ? Wake() : LaunchReady(); }

  const std::shared_ptr<const PlanInForce> plan_;
  const std::vector<bool> contributes_;
  internal::WorkerThread* const worker_;
  const std::shared_ptr<internal::Waits> waits_;

  mutable absl::Mutex mutex_;
  bool has_scale_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_skips_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool woken_ ABSL_GUARDED_BY(mutex_) =
      false;  // The worker has been asked, and has not begun to look.
  bool advancing_ ABSL_GUARDED_BY(mutex_) = false;  // It looks.
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;       // Works whose end wakes the worker.
  double scale_ ABSL_GUARDED_BY(mutex_) = 1.0;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> skipped_ ABSL_GUARDED_BY(mutex_);  // Empty: none.
  std::vector<std::optional<Ready>> ready_ ABSL_GUARDED_BY(mutex_);
  Event last_packed_ ABSL_GUARDED_BY(mutex_);  // The last bucket that became ready.
  std::vector<Event> begun_
      ABSL_GUARDED_BY(mutex_);  // By bucket, on a device: the input of the first round.
  std::vector<Event> reduced_
      ABSL_GUARDED_BY(mutex_);  // By bucket, on a device with streams: after OnReduced().
  std::vector<std::vector<Work>> works_ ABSL_GUARDED_BY(mutex_);  // By round, of launched buckets.
  std::optional<Work> used_ ABSL_GUARDED_BY(mutex_);              // Once it is launched.
  std::vector<Work> comparisons_
      ABSL_GUARDED_BY(mutex_);  // By round; each begins when its last bucket is launched.
  std::vector<GradFate> fates_ ABSL_GUARDED_BY(mutex_);  // By bucket, once OnReduced() has seen it.
  std::vector<BucketTimes> times_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> gradients_ = 0;
  bool measures_ends_ ABSL_GUARDED_BY(mutex_) = false;

  mutable absl::Mutex ends_mutex_
      ABSL_ACQUIRED_AFTER(mutex_);  // An operation may end while it is being issued.
  std::vector<absl::Time> ends_
      ABSL_GUARDED_BY(ends_mutex_);  // Ends of first rounds; empty: not measured.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_BUCKET_PIPELINE_H_
