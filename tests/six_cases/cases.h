// Six ways to leave a training loop earlier than another rank, of which two are right; and a
// seventh, twice.
//
//   for (const UnevenCase& uneven : kUnevenCases) ...
//   RankReport report = RunCase(uneven, /*inputs=*/5, comm);             // on each rank
//   std::vector<std::string> broken = Judge(uneven, {5, 6}, reports);    // empty: as promised
//
// Threads: RunCase() as the communicator; Judge() is pure.
// Source:  a PyTorch forum thread, in which four of the six ended without an answer, and one of
//          them with a wrong rank.

#ifndef EVENKEEL_TESTS_SIX_CASES_CASES_H_
#define EVENKEEL_TESTS_SIX_CASES_CASES_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tests/rank_report.h"

namespace evenkeel {

// Where the loop has a barrier on the bare communicator.
enum class BarrierAt { kNowhere, kBeginOfBody, kEndOfBody, kAfterLoop };

struct UnevenCase {
  const char* name;
  bool joins;
  BarrierAt barrier;
  bool is_right;              // It must succeed.
  const char* must_say = "";  // The operation, in every rank's message.
};

inline constexpr UnevenCase kUnevenCases[] = {
    {"1 join", true, BarrierAt::kNowhere, true},
    {"2 no join", false, BarrierAt::kNowhere, false, "step"},
    {"3 no join, barrier in the loop", false, BarrierAt::kBeginOfBody, false, "barrier"},
    {"4 join, barrier in the loop", true, BarrierAt::kBeginOfBody, false, "barrier"},
    {"5 no join, barrier after the loop", false, BarrierAt::kAfterLoop, false, "barrier"},
    {"6 join, barrier after the loop", true, BarrierAt::kAfterLoop, true},
    {"7 join, barrier ends the body", true, BarrierAt::kEndOfBody, false, "barrier"},
    {"7b no join, barrier ends the body", false, BarrierAt::kEndOfBody, false, "step"},
};

// Every rank ends within this time of the first one's leaving its loop.
inline constexpr absl::Duration kAtOnce = absl::Seconds(5);

// A rank's whole program, with its end: Finalize(), or Abort() after an error.
RankReport RunCase(const UnevenCase& uneven, int inputs, Communicator& comm);

double SecondsSinceDivergence(const std::vector<RankReport>& reports, int rank);

// One sentence for each broken promise; `reports` are by rank.
std::vector<std::string> Judge(const UnevenCase& uneven, const std::vector<int>& inputs,
                               const std::vector<RankReport>& reports);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_SIX_CASES_CASES_H_
