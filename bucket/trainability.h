// When it is checked what is trained, and what is said about it.
//
//   options.trainability = {.reader = [&](int i) { return tensors[i].requires_grad(); }};       // in each step
//   options.trainability = {.policy = TrainabilityPolicy::kEveryN, .every = 10, .reader = ...};
//   params.SetTrainable("encoder.", false);              // without a reader: the set itself knows, and checks are free
//
// A ParameterSet has a version, so finding out that nothing changed takes one comparison, whatever the policy. Only
// flags that live in the tensors of another library have to be walked: give a `reader` for those.
//
// Policies: kAlways         before each step
//           kEveryN         before every `every`-th step
//           kOnNotification after ParameterSet::SetTrainable() or TrainableChanged()
//           kNever          by RefreshTrainable() only, on all ranks
// What no check has seen is never trained wrongly: a change of the set is an error of the next step, one of the
// reader's flags an error of the step in which a gradient comes or is missing, or of the next check. Under kNever and
// kOnNotification all flags are still compared every `verify_every` steps.
//
// All ranks: equal options (but the functions), and the same changes before the same step.
// Source:    fairscale's ShardedDataParallel and the wishes of its review (github.com/facebookresearch/fairscale).

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
#include "evenkeel/bucket/trainable_mask.h"

namespace evenkeel {

enum class TrainabilityPolicy : uint8_t { kAlways, kEveryN, kOnNotification, kNever };

absl::string_view ToString(TrainabilityPolicy policy);

struct TrainabilityOptions {
  TrainabilityPolicy policy = TrainabilityPolicy::kAlways;
  int64_t every = 1;  // kEveryN: so many steps.
  // Whether a parameter is trained, where its tensor says so; null: where the set does. On the thread that runs steps.
  std::function<bool(int param)> reader;
  // Told of each flag that changes: ranks that ran dry, or enter another group, take over what the others train, and
  // the flags in their tensors must follow. Null: their owner sees to that.
  std::function<void(int param, bool trained)> writer;
  int64_t verify_every = 1000;  // kNever and kOnNotification; 0: not at all.

  bool warn_on_change = true;
  // After so many steps with a reader in which nothing had changed it is said once that the check was wasted; 0: never.
  int64_t wasted_after = 1000;
  std::string wasted_note;                      // How the reader of that warning turns the check off, in his terms.
  std::function<void(absl::string_view)> warn;  // Null: standard error.
};

// What one object that runs steps knows of its parameters' trainability. Threads: thread-compatible.
class TrainabilityWatch {
 public:
  // OK, or InvalidArgument for intervals that are none.
  static absl::Status Check(const TrainabilityOptions& options);

  // `params` outlives it. `name` begins its messages.
  TrainabilityWatch(TrainabilityOptions options, ParameterSet* params, absl::string_view name);

  // Step `step` (from 0, equal on all ranks) is about to begin. True: a change has to be taken over now, if there is
  // one. FailedPrecondition if there is one that the policy does not allow to be seen.
  absl::StatusOr<bool> BeforeStep(int64_t step);
  // Brings the set up to date with the reader.
  void Read();
  // The next step reads, under kOnNotification.
  void Notify() { is_notified_ = true; }
  // This is trained from now on.
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
  uint64_t same_version_ = 0;  // Of the set, when it was last the same.
  bool is_notified_ = false;
  bool has_changed_ever_ = false;
  int64_t wasted_ = 0;
  std::vector<uint8_t> flags_;  // Kept, so that reading takes no memory.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_TRAINABILITY_H_
