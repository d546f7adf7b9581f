// Averages of integers, exact, over backends that sum up and wrap around.
//
//   EK_ASSIGN_OR_RETURN(std::function<void()> conclude, WidenAverage(operation, world_size));
//   ... a backend sums up what `operation` is now, in wider integers ...
//   conclude();  // The averages are where the operation had its output.
//
// Result: the mean, rounded toward zero.
// Wire:   int32 for integers of 8 and 16 bits, which holds the sums of up to 2^16 ranks; int64 for
//         int32; for int64 two int64, its upper and its lower half.
// Errors: ResourceExhausted if there is no memory for the wider integers.

#ifndef EVENKEEL_COMM_ARITH_INTEGER_AVERAGE_H_
#define EVENKEEL_COMM_ARITH_INTEGER_AVERAGE_H_

#include <functional>

#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"

namespace evenkeel::internal {

// Changes `operation`, a kAverage of integers, to one of wider integers in memory that the returned
// function owns. Its `step_of` becomes the hash of the original operation, so that averages of
// different types that travel in one wider type do not match.
absl::StatusOr<std::function<void()>> WidenAverage(Operation& operation, int world_size);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_INTEGER_AVERAGE_H_
