// One rank's steps as JSON, which it sends with its heartbeats to observers of the job (TcpObserver
// in comm/rendezvous/tcp_store.h).
//
//   {"step": 417, "phase": "input", "exhausted": false, "waited_ms": 0,
//    "step_ms": 16.2, "cost": 0.18, "straggler": true, "cost_phase": "input",
//    "samples": 176.0,
//    "ms": {"outside of the step": 0.1, "input": 4.2, ..., "waiting": 3.0},
//    "ready_ms": {"first": 1.5, "last": 6.2}}
//
// The lines from the second on are those of the recent steps (straggler_report.h), and are missing
// until there are some. "samples": the mean of a step; missing if none are reported. "ready_ms":
// the part of backward until the first and until the last bucket of gradients was complete; missing
// if that is not known.

#ifndef EVENKEEL_JOIN_STEPS_STEP_STATUS_H_
#define EVENKEEL_JOIN_STEPS_STEP_STATUS_H_

#include <cstdint>
#include <string>

#include "evenkeel/join/steps/step_phase.h"
#include "evenkeel/join/steps/straggler_report.h"

namespace evenkeel {

struct StepStatus {
  int64_t step = 0;  // Steps begun.
  StepPhase phase = StepPhase::kOutside;
  bool is_exhausted = false;
  int64_t waited_ms = 0;  // Since the beginning of a wait that the communicator does not see.
};

// `rank` is the rank in the group of the report.
std::string ToJson(const StepStatus& status, const StragglerReport& recent, int rank);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_STATUS_H_
