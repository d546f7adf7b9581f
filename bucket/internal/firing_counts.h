// How often backward announces each parameter in a step, where the graph is the same in every step: recorded in one
// step, counted down in the others. So a parameter that is used several times, or by several forwards of one backward,
// is complete with its last announcement.
//
//   counts.Count(3)  ->  kRecorded        // the first step: nobody knows yet whether more will come
//   counts.EndRecording();
//   counts.BeginStep();
//   counts.Count(3)  ->  kMore, ..., kLast
//
// Threads: thread-compatible.
// Errors:  FailedPrecondition, which names the parameter and both counts: announced more often than recorded, or less
//          often by the step's end.
// Source:  the static graph of PyTorch's DistributedDataParallel.

#ifndef EVENKEEL_BUCKET_INTERNAL_FIRING_COUNTS_H_
#define EVENKEEL_BUCKET_INTERNAL_FIRING_COUNTS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"

namespace evenkeel {

class FiringCounts {
 public:
  enum class Verdict { kRecorded, kMore, kLast };

  // `params` names parameters in messages and must outlive this.
  explicit FiringCounts(const ParameterSet* params);

  // The next step records: nothing is known any more.
  void Forget();
  void BeginStep();
  // `param` is one of the set's.
  absl::StatusOr<Verdict> Count(int param);
  bool is_recorded() const { return is_recorded_; }
  // How often it is announced in a step; in the step that records, so far.
  int expected(int param) const { return is_recorded_ ? expected_[param] : fired_[param]; }
  // In the step that records: all parameters, in the order in which they were announced for the last time so far; those
  // that were not come last.
  std::vector<int> CompletionOrder() const;
  void EndRecording();
  // OK if every parameter was announced as often as recorded.
  absl::Status CheckComplete() const;

 private:
  absl::Status Changed(int param) const;

  const ParameterSet* params_;
  bool is_recorded_ = false;
  std::vector<int> expected_;  // By parameter.
  std::vector<int> fired_;     // Likewise, in this step.
  std::vector<int> last_;      // Likewise, which announcement of the step that records was its last; 0: none.
  int announcements_ = 0;      // In that step.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_FIRING_COUNTS_H_
