// The runtime under test in runtime_cases.cc, and the end of a test for which it has no device.
// Each program that runs the cases defines both.

#ifndef EVENKEEL_COMM_DEVICE_TESTING_RUNTIME_CASES_H_
#define EVENKEEL_COMM_DEVICE_TESTING_RUNTIME_CASES_H_

#include "absl/status/status.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

DeviceRuntime* TestedRuntime();
// Ends the test: skipped, with the reason, or failed.
void SkipOrFail(const absl::Status& why);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_TESTING_RUNTIME_CASES_H_
