// Records this process's calls of CUDA's driver, to show that it does not wait for the device.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<DriverTrace> trace, DriverTrace::Start());
//   ... a step ...
//   EXPECT_THAT(trace->Waits(), testing::IsEmpty());
//   EXPECT_GT(trace->calls("cuLaunchKernel"), 0);
//
// Traces all threads and libraries, including those that link the runtime statically: CUPTI sees
// all calls into the driver. One trace at a time.

#ifndef EVENKEEL_TESTS_GPU_DRIVER_TRACE_H_
#define EVENKEEL_TESTS_GPU_DRIVER_TRACE_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

class DriverTrace {
 public:
  static absl::StatusOr<std::unique_ptr<DriverTrace>> Start();
  virtual ~DriverTrace() = default;  // Ends it.

  // So far: names of calls that begin so, and how often.
  virtual int calls(absl::string_view prefix) const = 0;
  // Returns the calls in which the host waits for a device, or may: "cuStreamSynchronize: 2".
  virtual std::vector<std::string> Waits() const = 0;
};

// Returns true if a call of this name waits for a device, by CUDA's documentation:
// synchronisation, copies that are not asynchronous, memory that is taken or given back, modules
// that are loaded.
bool WaitsForDevice(absl::string_view call);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_GPU_DRIVER_TRACE_H_
