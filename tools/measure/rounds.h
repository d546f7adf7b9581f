// The loop of benchmarks that compare: runs blocks of several cases in turn.
//
//   EK_RETURN_IF_ERROR(RunRounds(cases.size(), /*rounds=*/30,
//                                [&](size_t i, int round) { return RunBlock(cases[i]); }));
//   RatioOf(seconds_of_case_0, seconds_of_case_1);  // paired_ratio.h
//
// A round has a block of each case, so a disturbance of the machine hits all cases alike: the
// blocks of a round are pairs. The first case changes every second round, and each second round has
// the order of the round before, reversed.
//
// Threads: `run` is called on the calling thread.
// Errors:  those of `run`, which end the loop.

#ifndef EVENKEEL_TOOLS_MEASURE_ROUNDS_H_
#define EVENKEEL_TOOLS_MEASURE_ROUNDS_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace evenkeel {

absl::Status RunRounds(size_t cases, int rounds,
                       absl::FunctionRef<absl::Status(size_t index, int round)> run);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_ROUNDS_H_
