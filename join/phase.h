// Marks the phase of a training step that a piece of a loop belongs to.
//
//   while (true) {
//     {
//       const PhaseScope input(comm, StepPhase::kInput);
//       if (!loader.Next(batch)) break;
//     }
//     EK_RETURN_IF_ERROR(ddp->BeginStep());
//     ...
//   }
//
// A DataParallel marks forward and backward, an Optimizer its update, WriteCheckpoint() saving. A
// loop marks the rest with a PhaseScope; time that no mark covers is kOutside. join/straggler.h
// shows what the group concludes from these times.
//
// Threads:   one thread per rank runs steps, and makes the scopes. Scopes nest; the inner one
//            counts.
// Ownership: the communicator must outlive a scope.
// Devices:   times are the host's, which does not wait for a device.

#ifndef EVENKEEL_JOIN_PHASE_H_
#define EVENKEEL_JOIN_PHASE_H_

#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {

class Communicator;

// Sets the phase of this rank for the lifetime of the object.
class PhaseScope {
 public:
  PhaseScope(Communicator& comm, StepPhase phase);
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Communicator& comm_;
  const StepPhase before_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_PHASE_H_
