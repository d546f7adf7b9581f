// Runs a scenario and collects what its ranks say. Ranks are processes of this program; those of
// the local backend are threads of one such process, so that whatever hangs can be ended.
//
//   absl::StatusOr<Outcome> outcome = RunScenario(MakeScenario(7, 12));
//
// In such a process `main` calls RunAsChild() instead.
//
// Threads: thread-safe.
// Errors:  of what surrounds the ranks: no process, no port. What becomes of the ranks is in the
//          outcome.

#ifndef EVENKEEL_TESTS_FAULTS_RUN_SCENARIO_H_
#define EVENKEEL_TESTS_FAULTS_RUN_SCENARIO_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/faults/verdict.h"

namespace evenkeel {

// After `patience` it hangs.
absl::StatusOr<Outcome> RunScenario(const Scenario& scenario, absl::Duration patience);

// `role`: "rank", this process is one; "threads": it has all of them.
absl::Status RunAsChild(const Scenario& scenario, absl::string_view role);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_FAULTS_RUN_SCENARIO_H_
