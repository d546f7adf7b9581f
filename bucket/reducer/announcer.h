// Takes a step's announcements: which gradients are there, in which order, and which buckets are
// ready with each.
//
//   announcer.OnPlan(/*is_other_mask=*/true);
//   announcer.Begin(StepMode::kSync);
//   EK_RETURN_IF_ERROR(announcer.GradientReady(3));   // from backward's threads
//   EK_RETURN_IF_ERROR(announcer.AnnounceTheRest());
//   EK_RETURN_IF_ERROR(announcer.CheckComplete());
//   announcer.End();
//
// A gradient is claimed, then copied into its bucket by the thread that announces it, without a
// lock, and then counted. The thread that counts the last one of a bucket launches it.
//
// Static graphs: the graph is the same in every step, so one step records how often backward
// announces each parameter, and the others count down. So a parameter that is used several times,
// or by several forwards of one backward, is complete with its last announcement.
//
// Threads: GradientReady() and NoGradient() are thread-safe; the rest is for the thread that runs
//          steps, before and after them.
// Errors:  FailedPrecondition names the parameter: announced twice, not in the plan, or missing at
//          the end; with a static graph announced more often than recorded, or less often by the
//          step's end. The first error stays the step's.
// Source:  the static graph of PyTorch's DistributedDataParallel.

#ifndef EVENKEEL_BUCKET_REDUCER_ANNOUNCER_H_
#define EVENKEEL_BUCKET_REDUCER_ANNOUNCER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reducer/launcher.h"

namespace evenkeel {

class Announcer {
 public:
  Announcer(const ReducerCore* core, Launcher* launcher) : core_(*core), launcher_(*launcher) {}

  // `is_other_mask`: other parameters are trained, so the next step records the graph anew.
  void OnPlan(bool is_other_mask);
  // Announces what a static graph does not reach.
  absl::Status Begin(StepMode mode);
  void End() { mode_.reset(); }

  absl::Status GradientReady(int param);
  absl::Status NoGradient(int param);
  absl::Status MarkUnused(absl::Span<const int> params);
  absl::Status CheckComplete() const;
  // The gradients of what this rank has not announced are none. After an error nothing more is
  // launched: what others wait for must not come as if there were no gradient.
  absl::Status AnnounceTheRest();

  // After a step, until the next one begins: the parameters in the order of their announcements,
  // and when each came; the longest launch; a hash of what was announced without a gradient.
  const std::vector<int>& order() const { return order_; }
  const std::vector<absl::Time>& arrivals() const { return arrivals_; }
  absl::Duration longest_launch() const { return longest_launch_; }
  uint64_t unused_hash() const { return unused_hash_; }
  // The first error of the step's announcements.
  absl::Status error() const {
    absl::MutexLock lock(&mutex_);
    return error_;
  }

 private:
  bool is_planned(int param) const { return core_.plan->is_planned(param); }
  // Its gradient is never missing.
  bool IsEmpty(int param) const { return (*core_.params)[param].value.count == 0; }
  // With static_graph, before the graph is known.
  bool IsCounting() const { return core_.options.static_graph && !is_recorded_; }
  absl::Status CheckCall(int param) const;
  absl::Status CheckGradientOf(int param) const;
  absl::Status CheckAllAnnounced() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GraphHasChanged(int param) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes it the step's error, unless there is one; returns that.
  absl::Status Fail(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether the parameter is complete.
  absl::StatusOr<bool> CountFiring(int param) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Claim(int param) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Arrive(int param) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Announce(int param) ABSL_LOCKS_EXCLUDED(mutex_);

  const ReducerCore& core_;
  Launcher& launcher_;

  // A static graph, across plans with equal masks.
  bool is_recorded_ = false;   // It is known.
  std::vector<int> expected_;  // By parameter: announcements in each step.

  std::optional<StepMode> mode_;  // Null: no step is running.

  // The state of the step. Before and after the announcements, members that only they change are
  // read without the lock.
  mutable absl::Mutex mutex_;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> fired_;  // By parameter: announcements.
  std::vector<int> last_;   // Likewise, in the step that records: which of all was its last.
  int firings_ = 0;
  std::vector<bool> claimed_;  // By parameter.
  std::vector<int> pending_;   // By bucket.
  std::vector<int> order_;
  std::vector<absl::Time> arrivals_;
  absl::Duration longest_launch_;
  uint64_t unused_hash_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_ANNOUNCER_H_
