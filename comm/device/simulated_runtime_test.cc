#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/device/testing/runtime_cases.h"
#include "gtest/gtest.h"

namespace evenkeel {

DeviceRuntime* TestedRuntime() {
  static SimulatedDevices devices({.count = 2, .delay = absl::Microseconds(200)});
  return &devices;
}
void SkipOrFail(const absl::Status& why) { FAIL() << why; }

}  // namespace evenkeel
