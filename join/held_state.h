// The state that a rank holds, and whether training may continue from it: the report of each
// Joinable to Recover() (join/recovery.h).
//
//   HeldState CheckState() const override {
//     if (!is_updating_) return {};
//     return {StateKind::kPatched, absl::StrCat(join_name(), " was in the middle of an update")};
//   }
//
//   kWhole    The state after steps_finished() steps.
//   kPatched  A mix of two steps: an interrupted update has written some parameters and not others.
//             Training continues from it only if no rank has a whole state.
//   kTorn     The state belongs to no step; training never continues from it.
//
//   from    to        by
//   kWhole  kPatched  an optimizer with split state, when an update writes its first parameter
//   kWhole  kTorn     a replicated optimizer that updates in backward, at its first update; a
//                     DataParallel, when a finished step fails later on the device, or when an
//                     uneven loop leaves it an optimizer state that is out of date
//   any     kTorn     Recover(), while it writes the state of another rank
//   any     kWhole    the end of the update, a loaded checkpoint, the end of Recover()
//
// A list of Joinables holds the worst of their states; it is kTorn, too, if its optimizers have
// finished different numbers of steps.

#ifndef EVENKEEL_JOIN_HELD_STATE_H_
#define EVENKEEL_JOIN_HELD_STATE_H_

#include <string>
#include <utility>

namespace evenkeel {

enum class StateKind { kWhole, kPatched, kTorn };  // From best to worst.

struct HeldState {
  StateKind kind = StateKind::kWhole;
  std::string why;  // Why it is not whole.

  // Keeps the worse state; of two equally bad ones, `other`.
  void Worsen(HeldState other) {
    if (other.kind != StateKind::kWhole && other.kind >= kind) *this = std::move(other);
  }

  static void VisitFields(auto& self, auto& visit) {
    visit(visit.UpTo(self.kind, StateKind::kTorn), self.why);
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_HELD_STATE_H_
