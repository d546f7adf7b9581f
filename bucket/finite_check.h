// The check of a rank's own gradient, before it is reduced, for elements that are infinite or not a
// number.
//
//   if (comm.check_finite()) EK_RETURN_IF_ERROR(CheckFinite(comm, params, param, bucket));
//
// Threads: thread-safe for different parameters.

#ifndef EVENKEEL_BUCKET_FINITE_CHECK_H_
#define EVENKEEL_BUCKET_FINITE_CHECK_H_

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::internal {

// Returns FailedPrecondition, with the rank, the parameter, the element and the step, if an element
// is not finite. It has called Communicator::Abort() with that error, because the other ranks wait
// for a bucket that will not come. The gradient, dense or sparse, is on the host. The error names
// `bucket` unless the gradient is sparse.
absl::Status CheckFinite(Communicator& comm, const ParameterSet& params, int param, int bucket);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_BUCKET_FINITE_CHECK_H_
