// A device for benchmarks, and how long work on its stream takes.
//
//   EK_ASSIGN_OR_RETURN(BenchDevice bench, OpenBenchDevice("cuda"));
//   EK_ASSIGN_OR_RETURN(double seconds,
//                       bench.Seconds([&] { return copy.Run(bench.stream.ref()); }));
//
// The time is that of the device's clock between two events around what `work` puts on the stream;
// that of simulated devices says nothing about any device and keeps benchmarks alive. The host
// waits for the end, so give it many launches.

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

// The first device of `kind`: "cuda" or "simulated". FailedPrecondition where there is none,
// Unimplemented where this build has no CUDA.
absl::StatusOr<BenchDevice> OpenBenchDevice(absl::string_view kind);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_GPU_OPEN_DEVICE_H_
