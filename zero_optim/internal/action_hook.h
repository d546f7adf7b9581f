// The join hook of something that acts only when the lowest active rank announces that it did.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_ACTION_HOOK_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_ACTION_HOOK_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel::internal {

class ActionHook : public JoinHook {
 public:
  using Action = std::function<absl::Status(const StepAnswer& step, absl::string_view payload)>;

  explicit ActionHook(Action action) : action_(std::move(action)) {}
  absl::Status OnAction(const StepAnswer& step, absl::string_view payload) override { return action_(step, payload); }

 private:
  const Action action_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_ACTION_HOOK_H_
