// What a reducer asks of the parameters that it is made for, before anything is communicated.
//
// Threads: pure functions.

#ifndef EVENKEEL_BUCKET_INTERNAL_REDUCER_CHECKS_H_
#define EVENKEEL_BUCKET_INTERNAL_REDUCER_CHECKS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

// There are parameters, valid ones, of float types, on the group's device, with a stream there, and no other reducer moves
// their gradients. Unless gradients are views of buckets, they have memory. Ignored ones may be anything.
absl::Status CheckParameters(const ParameterSet& params, Device group_device, bool gradients_are_views);

// Parameters that are not ignored lie where `group` ("the group", "the new group") has its tensors.
absl::Status CheckDevice(const ParameterSet& params, Device group_device, absl::string_view group);
// Where that is no CPU, the parameters have a stream on it.
absl::Status CheckStream(const ParameterSet& params, Device group_device, absl::string_view group);

// What is delayed, and until when, is named both or not at all, and is there.
absl::Status CheckDelayed(const ParameterSet& params, const std::vector<std::string>& delayed,
                          absl::string_view delay_until);

// The gradient that is about to be read is still of its value's count, type and device, and has memory.
absl::Status CheckGradient(const Parameter& param);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_REDUCER_CHECKS_H_
