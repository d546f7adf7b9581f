// Chooses the step and the rank's state from which survivors continue. Every survivor decides from
// the same facts of all, and so with the same result.
//
//   RecoveryFacts mine{...};  // exchanged over the control plane
//   EK_ASSIGN_OR_RETURN(RecoveryPlan plan, PlanRecovery(by_rank));
//
// Threads: pure functions of values.
// Errors:  FailedPrecondition if no rank has a usable state, InvalidArgument if the ranks pass
//          different Joinables, or a rank's own error.

#ifndef EVENKEEL_JOIN_INTERNAL_RECOVERY_PLAN_H_
#define EVENKEEL_JOIN_INTERNAL_RECOVERY_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/join/held_state.h"

namespace evenkeel::internal {

struct RecoveryFacts {
  absl::Status error;           // Why this rank can't take part.
  bool is_newcomer = false;     // It has no state yet.
  std::string names;            // The Joinables' names, sorted.
  int64_t steps = 0;            // Optimizer steps that it has finished.
  std::vector<int64_t> counts;  // By optimizer, in the order of their names.
  HeldState state;              // The worst of its Joinables' states.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.error, self.is_newcomer, self.names, self.steps, self.counts, self.state);
  }
};

struct RecoveryPlan {
  int source = 0;
  int64_t steps = 0;
  std::vector<int64_t> counts;  // The source's counts.
  std::vector<int> newcomers;   // Ranks.
  std::vector<int64_t>
      ahead;  // By rank: steps that it has finished beyond those; -1: its state is not whole.
};

absl::StatusOr<RecoveryPlan> PlanRecovery(const std::vector<RecoveryFacts>& by_rank);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_JOIN_INTERNAL_RECOVERY_PLAN_H_
