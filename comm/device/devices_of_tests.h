// Which CUDA devices tests can use, in builds with a toolkit and without; for gpu_test_support.cc.

#ifndef EVENKEEL_COMM_DEVICE_DEVICES_OF_TESTS_H_
#define EVENKEEL_COMM_DEVICE_DEVICES_OF_TESTS_H_

#include "absl/status/statusor.h"

namespace evenkeel::internal {

absl::StatusOr<int> DevicesOfTests();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_DEVICE_DEVICES_OF_TESTS_H_
