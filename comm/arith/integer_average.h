// Averages of integers, exact, over backends that sum up and wrap around.
//
//   EK_ASSIGN_OR_RETURN(std::function<void()> conclude, WidenAverage(operation, world_size));
//   ... a backend sums up what `operation` is now, in wider integers ...
//   conclude();  // The averages are where the operation had its output.
//
// Result: the mean, rounded toward zero.
// Wire:   int32 for integers of 8 and 16 bits, of which up to 2^16 ranks fit into a sum; int64 for
//         int32; for int64 two int64, its upper and its lower half.
// Errors: ResourceExhausted if there is no memory for the wider integers.

#ifndef EVENKEEL_COMM_ARITH_INTEGER_AVERAGE_H_
#define EVENKEEL_COMM_ARITH_INTEGER_AVERAGE_H_

#include <functional>

#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"

namespace evenkeel::internal {

// Makes the operation, a kAverage of integers, one of wider integers in memory that the returned
// function owns. `step_of` distinguishes it from those of other types that travel alike.
absl::StatusOr<std::function<void()>> WidenAverage(Operation& operation, int world_size);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_INTEGER_AVERAGE_H_
