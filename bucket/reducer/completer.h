// Completes a step: waits for its buckets, writes gradients and their states back, and keeps what
// steps were like: statistics, and the measurements that choose caps and fusion.
//
//   launcher.Begin(/*measures_ends=*/completer.BeginStep());
//   ...
//   EK_RETURN_IF_ERROR(completer.Complete(scale));
//   EK_RETURN_IF_ERROR(completer.Account(&announcer));
//   if (auto next = completer.MeasuredPlan()) ...      // between steps: another plan is better
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_REDUCER_COMPLETER_H_
#define EVENKEEL_BUCKET_REDUCER_COMPLETER_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reducer/announcer.h"
#include "evenkeel/bucket/reducer/launcher.h"
#include "evenkeel/bucket/reducer/plan_tuner.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/bucket/step_times.h"

namespace evenkeel {

class Completer {
 public:
  Completer(const ReducerCore* core, Launcher* launcher);

  void OnPlan();
  // The plan that the measurements ask for; nothing if they ask for no other.
  std::optional<PlanState> MeasuredPlan() const;

  // A synchronising step begins; returns whether it is measured.
  bool BeginStep();
  absl::Status Complete(double scale);
  // Counts a synchronising step that has ended well, before the launcher forgets it. `announcer`
  // null: this rank shadowed it. All ranks together: they may choose by the measurements.
  absl::Status Account(const Announcer* announcer);

  // Put together when asked; may allocate.
  ReducerStats stats() const;
  ReducerStats& counted() { return counted_; }
  const StepTimes& times() const { return times_; }
  int64_t reductions() const { return reductions_; }
  void OnOtherGroup() { ++reductions_; }

 private:
  bool IsMeasured() const;
  void WriteBack();
  absl::Status WriteBackOnDevice();
  absl::Status SetUsed(absl::Span<const int> buckets);

  const ReducerCore& core_;
  Launcher& launcher_;
  absl::Time begin_;  // The start of the current step.
  StepTimes times_;   // The last step that this rank has synchronised.
  int64_t reductions_ = 0;
  uint64_t last_unused_hash_ = 0;
  StepAverages averages_;
  ReducerStats counted_;              // Only its counters are used.
  std::unique_ptr<PlanTuner> tuner_;  // With tune.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_COMPLETER_H_
