#include "evenkeel/zero_optim/checkpoint/pending_save.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"

namespace evenkeel {

bool PendingSave::IsDone() const {
  if (state_ == nullptr) return true;
  absl::MutexLock lock(&state_->mutex);
  return state_->is_done;
}

absl::Status PendingSave::Wait(absl::Duration timeout) const {
  if (state_ == nullptr) return absl::OkStatus();
  absl::MutexLock lock(&state_->mutex);
  if (AwaitFor(state_->mutex, absl::Condition(&state_->is_done), timeout)) return state_->status;
  return absl::DeadlineExceededError(absl::StrCat("the checkpoint is not complete after ",
                                                  absl::FormatDuration(timeout),
                                                  "; it is still being written"));
}

}  // namespace evenkeel
