// A rank of a scenario: it trains, and something happens to it or to another rank.
//
//   RankReport report = RunFaultyRank(scenario, *comm, site);    // returns if the rank lives
//
// Threads: as the communicator.

#ifndef EVENKEEL_TESTS_FAULTS_FAULTY_RANK_H_
#define EVENKEEL_TESTS_FAULTS_FAULTY_RANK_H_

#include <functional>

#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/rank_report.h"

namespace evenkeel {

// The faults that a rank can cause in itself depend on whether it is a thread or a process.
struct FaultSite {
  // Tells who counts the ranks: that the fault is about to happen.
  std::function<void(const RankReport&)> say;
  // Ends the rank, without a word to its group: it does not return.
  std::function<void()> die;
  // Does nothing until all others have ended, or for ever.
  std::function<void()> stop;
  // The connection that the scenario names.
  std::function<void()> cut;
};

// After so long without a word a rank is lost.
inline constexpr absl::Duration kSilence = absl::Milliseconds(1500);

CommunicatorOptions OptionsOf(const Scenario& scenario);

// An error of the loop's body has this in its message.
inline constexpr char kBodyError[] = "record 4711 is broken";

// With its end: Finalize(), or Abort() after an error.
RankReport RunFaultyRank(const Scenario& scenario, Communicator& comm, const FaultSite& site);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_FAULTS_FAULTY_RANK_H_
