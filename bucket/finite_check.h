// The check of a rank's own gradient, before it is reduced, for elements that are infinite or not a
// number.
//
//   EK_ASSIGN_OR_RETURN(const bool checks_finite, ChecksFinite(options.check_finite));
//   if (checks_finite) EK_RETURN_IF_ERROR(CheckFinite(comm, params, param));
//
// Threads: thread-safe for different parameters.

#ifndef EVENKEEL_BUCKET_FINITE_CHECK_H_
#define EVENKEEL_BUCKET_FINITE_CHECK_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::internal {

// Returns whether `option` or EVENKEEL_CHECK_FINITE=1 requests the check. InvalidArgument for a
// value of the variable other than 0 and 1.
absl::StatusOr<bool> ChecksFinite(bool option);

// Returns FailedPrecondition, with the rank, the parameter, the element, the step and the bucket,
// if there is one, when an element is not finite. Before that it calls Communicator::Abort() with
// the error, because the other ranks wait for a bucket that will not come. The gradient, dense or
// sparse, is on the host.
absl::Status CheckFinite(Communicator& comm, const ParameterSet& params, int param,
                         std::optional<int> bucket = std::nullopt);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_BUCKET_FINITE_CHECK_H_
