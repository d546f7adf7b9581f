// A device for benchmarks, with a stream and a timer for work on it.
//
//   EK_ASSIGN_OR_RETURN(BenchDevice bench, OpenBenchDevice("cuda"));
//   EK_ASSIGN_OR_RETURN(double seconds,
//                       bench.Seconds([&] { return copy.Run(bench.stream.ref()); }));
//
// Seconds() returns the time of the device's clock between two events around the work that `work`
// puts on the stream. Times of simulated devices have no meaning; they let tests run the
// benchmarks. The host waits for the end, so one call should contain many launches.

#ifndef EVENKEEL_TOOLS_GPU_OPEN_DEVICE_H_
#define EVENKEEL_TOOLS_GPU_OPEN_DEVICE_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

struct BenchDevice {
  DeviceRuntime* runtime = nullptr;  // This process's; never destroyed.
  Stream stream;

  absl::StatusOr<double> Seconds(absl::FunctionRef<absl::Status()> work) const;
};

// Opens the first device of `kind`, "cuda" or "simulated". Returns FailedPrecondition if there is
// none, Unimplemented if this build has no CUDA.
absl::StatusOr<BenchDevice> OpenBenchDevice(absl::string_view kind);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_GPU_OPEN_DEVICE_H_
