// What every DeviceMath refuses before it calls a library: so all answer alike, and no library is given what it would
// read from memory that is not there.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_CHECKS_H_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_CHECKS_H_

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel::internal {

// InvalidArgument with types and strides unless math.h allows them.
absl::Status CheckProduct(const StridedShape& s, DType factors, DType output);
absl::Status CheckConvolution(const DeviceConvolution& s);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_MATH_CHECKS_H_
