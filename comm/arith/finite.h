// Finds numbers that are infinite or not a number.
//
//   if (const int64_t bad = FirstNonfinite(gradient); bad >= 0) ... element `bad` ...
//
// Threads: pure function on the caller's memory.

#ifndef EVENKEEL_COMM_ARITH_FINITE_H_
#define EVENKEEL_COMM_ARITH_FINITE_H_

#include <cstdint>

#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

// Returns the index of the first element that is not finite; -1 if all are, as integers are. The
// data is on the host.
int64_t FirstNonfinite(const TensorView& data);
// For tests: on one of SupportedInstructionSets().
int64_t FirstNonfiniteWith(InstructionSet set, const TensorView& data);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_FINITE_H_
