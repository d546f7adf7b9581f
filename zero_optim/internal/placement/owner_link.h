// Links a reduction, which its reducer owns, to the optimizer that made it; either may be destroyed
// first.
//
//   return link->Call([&](Optimizer& optimizer) { return optimizer.OnReduced(bucket); });
//
// Threads: thread-safe. Cut() waits for a call that runs; a call may wait for other ranks, with a
//          deadline.
// Errors:  FailedPrecondition after Cut().

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_OWNER_LINK_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_OWNER_LINK_H_

#include <string>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace evenkeel::internal {

template <typename Owner>
class OwnerLink {
 public:
  OwnerLink(Owner* owner, std::string name) : name_(std::move(name)), owner_(owner) {}

  // Called first in the owner's destructor.
  void Cut() {
    absl::MutexLock lock(&mutex_);
    owner_ = nullptr;
  }
  // Returns what `call` returns: an absl::Status or absl::StatusOr.
  template <typename Function>
  std::invoke_result_t<Function, Owner&> Call(const Function& call) {
    absl::MutexLock lock(&mutex_);
    if (owner_ != nullptr) return call(*owner_);
    return absl::FailedPreconditionError(
        absl::StrCat(name_,
                     ", which updates what this DataParallel reduces, has been destroyed: keep it "
                     "as long as steps begin, or destroy the DataParallel, too"));
  }

 private:
  const std::string name_;
  absl::Mutex mutex_;
  Owner* owner_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_OWNER_LINK_H_
