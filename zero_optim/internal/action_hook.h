// Shared by optimizers as Joinables: a hook that acts only when the lowest active rank announces
// that it did.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_ACTION_HOOK_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_ACTION_HOOK_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel::internal {

class ActionHook : public JoinHook {
 public:
  using Action = std::function<absl::Status(const StepAnswer& step, absl::string_view payload)>;

  // `at_end` runs when all ranks are exhausted, `on_exhausted`, if any, when this one is.
  ActionHook(Action action, std::function<absl::Status(bool is_last_joiner)> at_end,
             std::function<absl::Status()> on_exhausted = nullptr)
      : action_(std::move(action)),
        at_end_(std::move(at_end)),
        on_exhausted_(std::move(on_exhausted)) {}
  absl::Status OnExhausted() override {
    return on_exhausted_ == nullptr ? absl::OkStatus() : on_exhausted_();
  }
  absl::Status OnAction(const StepAnswer& step, absl::string_view payload) override {
    return action_(step, payload);
  }
  absl::Status PostHook(bool is_last_joiner) override { return at_end_(is_last_joiner); }

 private:
  const Action action_;
  const std::function<absl::Status(bool)> at_end_;
  const std::function<absl::Status()> on_exhausted_;
};

// Ranks without inputs do only what is announced; the rest waits for the end of the loop.
inline absl::Status InsideJoinError(absl::string_view name, absl::string_view call) {
  return absl::FailedPreconditionError(absl::StrCat(
      name, ": ", call,
      " inside a join, where exhausted ranks would miss it: call it outside of the loop"));
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_ACTION_HOOK_H_
