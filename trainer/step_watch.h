// Tells a rank that has run dry of what the others do. It takes part in the join without a collective of its own.
//
//   StepWatch watch(comm, "watch", JoinPhase::kDefault);
//   watch.on_call = [&](const StepAnswer& answer) { ... };    // on a dry rank, in each of the others' steps
//   RunJoined({..., &watch}, options, [&](JoinScope&) {
//     ... EK_RETURN_IF_ERROR(watch.TakePart()); ...           // once in each step of one's own
//   });
//
// Ownership: the communicator outlives it.
// Threads:   thread-compatible.
// Errors:    what `on_call` answers ends the group.

#ifndef EVENKEEL_TRAINER_STEP_WATCH_H_
#define EVENKEEL_TRAINER_STEP_WATCH_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/step_control.h"
#include "evenkeel/join/joinable.h"

namespace evenkeel {

class StepWatch : public Joinable {
 public:
  // Its place in a step: before the optimizer, or after it.
  StepWatch(Communicator* comm, absl::string_view name, JoinPhase phase) : Joinable(comm, name), phase_(phase) {}

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

#endif  // EVENKEEL_TRAINER_STEP_WATCH_H_
