// Options and checks for changes of the set of trained parameters.
//
//   // in each step
//   options.trainability = {.reader = [&](int i) { return tensors[i].requires_grad(); }};
//   options.trainability = {.policy = TrainabilityPolicy::kEveryN, .every = 10, .reader = ...};
//   // without a reader the set keeps the flags, and checks are free
//   params.SetTrainable("encoder.", false);
//
// A ParameterSet has a version, so a check without a change is one comparison with any policy. Only
// flags in the tensors of another library must be read one by one: pass a `reader` for those.
//
// Policies: kAlways         before each step
//           kEveryN         before every `every`-th step
//           kOnNotification after ParameterSet::SetTrainable() or TrainableChanged()
//           kNever          by RefreshTrainable() only, on all ranks
// An unnoticed change never causes wrong training: a change of the set is an error in the next
// step, a change of the reader's flags an error in the step with an unexpected or a missing
// gradient, or in the next check. With kNever and kOnNotification all flags are still compared
// every `verify_every` steps.
//
// All ranks: equal options (except for the functions), and equal changes before the same step.
// Source:    fairscale's ShardedDataParallel and the requests in its review
//            (github.com/facebookresearch/fairscale).

#ifndef EVENKEEL_BUCKET_TRAINABILITY_H_
#define EVENKEEL_BUCKET_TRAINABILITY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/trainable_mask.h"

namespace evenkeel {

enum class TrainabilityPolicy : uint8_t { kAlways, kEveryN, kOnNotification, kNever };

absl::string_view ToString(TrainabilityPolicy policy);

struct TrainabilityOptions {
  TrainabilityPolicy policy = TrainabilityPolicy::kAlways;
  int64_t every = 1;  // The interval of kEveryN, in steps.
  // Returns whether a parameter is trained, from the flag of its tensor. Null: the set has the
  // flags. Called on the thread that runs steps.
  std::function<bool(int param)> reader;
  // Called with each flag that changes: ranks that are exhausted, or enter another group, adopt the
  // set of the others, and the flags in their tensors must follow. Null: the caller updates them.
  std::function<void(int param, bool trained)> writer;
  int64_t verify_every = 1000;  // For kNever and kOnNotification; 0 disables the comparison.

  bool warn_on_change = true;
  // After this many steps with a reader and without a change, a warning is logged once; 0: never.
  int64_t wasted_after = 1000;
  std::string wasted_note;                      // How to turn the check off, for that warning.
  std::function<void(absl::string_view)> warn;  // Null: stderr.
};

// Watches the trainability of the parameters for an object that runs steps. Thread-compatible.
class TrainabilityWatch {
 public:
  // Returns OK, or InvalidArgument for invalid intervals.
  static absl::Status Check(const TrainabilityOptions& options);

  // `params` must outlive it. Messages begin with `name`.
  TrainabilityWatch(TrainabilityOptions options, ParameterSet* params, absl::string_view name);

  // Called before step `step` (from 0, equal on all ranks). Returns true if a change must be
  // adopted now; FailedPrecondition if there is a change that the policy does not check for.
  absl::StatusOr<bool> BeforeStep(int64_t step);
  // Updates the set from the reader.
  void Read();
  // Makes the next step read the flags, with kOnNotification.
  void Notify() { is_notified_ = true; }
  // Adopts the set of trained parameters.
  void Adopt(const TrainableMask& mask);

 private:
  bool IsTimeFor(int64_t step);
  bool HasChanged();
  void CountWasted();
  void Warn(absl::string_view text) const;

  const TrainabilityOptions options_;
  ParameterSet* const params_;
  const std::string name_;
  TrainableMask adopted_;
  uint64_t same_version_ = 0;  // The set's version at the last comparison without a change.
  bool is_notified_ = false;
  bool has_changed_ever_ = false;
  int64_t wasted_ = 0;
  std::vector<uint8_t> flags_;  // A member, so that reading does not allocate.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_TRAINABILITY_H_
