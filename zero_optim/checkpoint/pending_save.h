// A save that continues after the call that started it has returned.
//
//   EK_ASSIGN_OR_RETURN(const PendingSave save, optimizer->SaveAsync("checkpoints/step_1000"));
//   ... further steps ...
//   EK_RETURN_IF_ERROR(save.Wait(absl::Minutes(10)));  // OK: the checkpoint is complete
//
// Threads:   thread-safe. Copies refer to the same save.
// Ownership: a save does not end with its PendingSave. The communicator, and the object that
//            started the save, outlive it; the object's destructor waits for it.
// Errors:    of Wait(): rank 0 decides, so that all ranks return its result, with the error of the
//            lowest failing rank. If the group ends meanwhile, or a rank needs longer than the
//            group's timeout, a rank without the result returns that error: the checkpoint is
//            complete or absent, but this rank cannot find out which. DeadlineExceeded: the save
//            still runs (IsDone() is false), or a rank took longer than the timeout.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_PENDING_SAVE_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_PENDING_SAVE_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace evenkeel {

class PendingSave {
 public:
  PendingSave() = default;  // No save: it is done, and OK.

  bool IsDone() const;
  absl::Status Wait(absl::Duration timeout) const;

 private:
  friend class CheckpointWriter;
  struct State {
    void End(const absl::Status& how) {
      absl::MutexLock lock(&mutex);
      status = how;
      is_done = true;
    }

    absl::Mutex mutex;
    bool is_done ABSL_GUARDED_BY(mutex) = false;
    absl::Status status ABSL_GUARDED_BY(mutex);
  };

  std::shared_ptr<State> state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_PENDING_SAVE_H_
