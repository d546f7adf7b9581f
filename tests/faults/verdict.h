// The promises that a scenario's outcome breaks.
//
//   Verdict verdict = Judge(scenario, outcome);
//   verdict.is_good(), verdict.complaints         // "rank 2 ends with wrong weights"
//
// Threads: pure function of values.

#ifndef EVENKEEL_TESTS_FAULTS_VERDICT_H_
#define EVENKEEL_TESTS_FAULTS_VERDICT_H_

#include <string>
#include <vector>

#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/rank_report.h"

namespace evenkeel {

struct Outcome {
  std::vector<RankReport> reports;  // By rank.
  bool is_over = true;              // False: it had to be ended.
  std::string crash;                // How a process ended that should have ended well.
  std::string complaints;           // The ranks' output on standard error.
};

struct Verdict {
  bool hangs = false;       // Somebody who should have ended has not.
  bool is_wrong = false;    // A wrong number: in weights, in what a collective gave.
  bool is_unnamed = false;  // An error that does not name the guilty rank.
  bool is_other = false;    // Success where there must be an error, an error where there must be
                            // none; too late; a crash.
  std::vector<std::string> complaints;
  std::vector<double> seconds;  // From the fault to each other rank's report of it.

  bool is_good() const { return complaints.empty(); }
};

Verdict Judge(const Scenario& scenario, const Outcome& outcome);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_FAULTS_VERDICT_H_
