// Which gradients of a step have been announced, in which order, and which bucket each completes. Pure bookkeeping.
//
// Threads: thread-compatible.
// Errors:  FailedPrecondition names the parameter: announced twice, not in the plan, or missing at the end.

#ifndef EVENKEEL_BUCKET_INTERNAL_READY_TRACKER_H_
#define EVENKEEL_BUCKET_INTERNAL_READY_TRACKER_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/planner.h"

namespace evenkeel {

class ReadyTracker {
 public:
  ReadyTracker() = default;
  // `params` names parameters in messages and must outlive this.
  ReadyTracker(const BucketPlan& plan, const ParameterSet* params);

  void Reset();
  // Returns the bucket that is complete with this parameter, or -1.
  absl::StatusOr<int> Announce(int param);
  // OK if every planned parameter was announced.
  absl::Status CheckComplete() const;

  bool is_planned(int param) const { return bucket_of_[param] >= 0; }
  bool is_announced(int param) const { return announced_[param]; }
  bool is_complete(int bucket) const { return pending_[bucket] == 0; }
  const std::vector<int>& order() const { return order_; }

 private:
  const ParameterSet* params_ = nullptr;
  std::vector<int> bucket_of_;   // By parameter; -1: not planned.
  std::vector<int> sizes_;       // By bucket.
  std::vector<int> pending_;     // By bucket: parameters that have not been announced.
  std::vector<bool> announced_;  // By parameter.
  std::vector<int> order_;
  int planned_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_READY_TRACKER_H_
