// The report of a rank at its end, as one line of text, and the facts that its message contains.
//
//   std::cout << ToLine(report);                                    // in the rank
//   EK_ASSIGN_OR_RETURN(RankReport report, ReportFromLine(line));   // where ranks are counted
//   NamedRanks("rank 3 waits; ranks 0,2 have left")                 // {0, 2, 3}
//
// Times are of the machine's monotonic clock, which all its processes share.
//
// Threads: pure functions of values.

#ifndef EVENKEEL_TESTS_RANK_REPORT_H_
#define EVENKEEL_TESTS_RANK_REPORT_H_

#include <cstdint>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {

int64_t MonotonicNanos();

struct RankReport {
  int rank = -1;
  int64_t diverged =
      0;  // When this rank did what the others do not expect; 0: it did nothing of the kind.
  int64_t ended = 0;            // When it knew how its part has ended; 0: it has not said.
  bool has_wrong_data = false;  // A collective has succeeded with it.
  ToyResult result;             // With the end of the group in its status.
};

std::string ToLine(const RankReport& report);
absl::StatusOr<RankReport> ReportFromLine(absl::string_view line);

// All ranks that a message names.
std::set<int> NamedRanks(absl::string_view message);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_RANK_REPORT_H_
