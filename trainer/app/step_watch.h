// Notifies an exhausted rank of the active ranks' steps. It takes part in the join without a
// collective of its own.
//
//   StepWatch watch(comm, "watch", JoinPhase::kDefault);
//   // on an exhausted rank, in each step of the active ranks
//   watch.on_call = [&](const StepAnswer& answer) { ... };
//   RunJoined({..., &watch}, options, [&](JoinScope&) {
//     ... EK_RETURN_IF_ERROR(watch.TakePart()); ...           // once in each own step
//   });
//
// Ownership: the communicator outlives it.
// Threads:   thread-compatible.
// Errors:    an error of `on_call` ends the group.

#ifndef EVENKEEL_TRAINER_APP_STEP_WATCH_H_
#define EVENKEEL_TRAINER_APP_STEP_WATCH_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

class StepWatch : public Joinable {
 public:
  // `phase` is its place in a step: before or after the optimizer.
  StepWatch(Communicator* comm, absl::string_view name, JoinPhase phase)
      : Joinable(comm, name), phase_(phase) {}

  JoinPhase join_phase() const override { return phase_; }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }

  absl::Status TakePart() { return Notify().status(); }

  std::function<absl::Status(const StepAnswer&)> on_call;  // Set while an epoch runs.

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(StepWatch* watch) : watch_(watch) {}
    absl::Status MainHook(const StepAnswer& step) override { return watch_->on_call(step); }

   private:
    StepWatch* const watch_;
  };

  const JoinPhase phase_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_STEP_WATCH_H_
