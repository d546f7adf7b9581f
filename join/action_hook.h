// The actions of a Joinable in a step, which exhausted ranks repeat, as structs instead of bytes.
//
//   struct SetRate {
//     double rate = 0;
//     static void VisitFields(auto& self, auto& visit) { visit(self.rate); }
//   };
//   using RateHook = ActionHook<SetRate>;
//   EK_RETURN_IF_ERROR(RateHook::Announce(*this, {.rate = 0.1}));  // on active ranks, in a step
//   return std::make_unique<RateHook>(                              // in MakeJoinHook()
//       [this](const StepAnswer&, const SetRate& action) { return Set(action.rate); });
//
// A Joinable with several kinds of actions uses a std::variant of such structs; comm/base/fields.h
// lists the types of fields.

#ifndef EVENKEEL_JOIN_ACTION_HOOK_H_
#define EVENKEEL_JOIN_ACTION_HOOK_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

template <typename Action>
class ActionHook final : public JoinHook {
 public:
  using Repeat = std::function<absl::Status(const StepAnswer& step, const Action& action)>;

  // Adds an action to the current step, in which the Joinable must take part (Joinable::Notify()).
  // Does not wait. FailedPrecondition if no step has begun.
  static absl::Status Announce(const Joinable& joinable, const Action& action) {
    return StepControl::Of(joinable.communicator())
        .Announce(joinable.join_name(), internal::ToBytes(action));
  }

  // `repeat` runs on an exhausted rank for each action, `on_exhausted` when this rank becomes
  // exhausted, and `at_end` on all ranks when all are exhausted or stop early.
  explicit ActionHook(Repeat repeat,
                      std::function<absl::Status(bool is_last_joiner)> at_end = nullptr,
                      std::function<absl::Status()> on_exhausted = nullptr)
      : repeat_(std::move(repeat)),
        at_end_(std::move(at_end)),
        on_exhausted_(std::move(on_exhausted)) {}

  absl::Status OnExhausted() override {
    return on_exhausted_ == nullptr ? absl::OkStatus() : on_exhausted_();
  }
  absl::Status OnAction(const StepAnswer& step, absl::string_view payload) override {
    const absl::StatusOr<Action> action = internal::FromBytes<Action>(payload, "the action");
    if (action.ok()) return repeat_(step, *action);
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", step.lowest_active, " sent an action that cannot be read (",
                     action.status().message(), "): do the ranks run the same program?"));
  }
  absl::Status PostHook(bool is_last_joiner) override {
    return at_end_ == nullptr ? absl::OkStatus() : at_end_(is_last_joiner);
  }

 private:
  const Repeat repeat_;
  const std::function<absl::Status(bool)> at_end_;
  const std::function<absl::Status()> on_exhausted_;
};

// Returns the error of a call that has no action, and so is not allowed inside the loop.
inline absl::Status InsideJoinError(absl::string_view name, absl::string_view call) {
  return absl::FailedPreconditionError(absl::StrCat(
      name, ": ", call,
      " inside a join, where exhausted ranks would miss it: call it outside of the loop"));
}

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_ACTION_HOOK_H_
