// How long work on a stream takes, for benchmarks: by the device's own clock where it has one.
//
//   EK_ASSIGN_OR_RETURN(BenchDevice bench, OpenBenchDevice("cuda"));
//   EK_ASSIGN_OR_RETURN(double seconds,
//                       bench.timer->Seconds([&] { return copy.Run(bench.stream.ref()); }));
//
// On CUDA between two of its events around what `work` puts on the stream; on simulated devices the
// host's clock, which says nothing about any device and keeps benchmarks alive. The host waits for
// the end, so give it many launches.

#ifndef EVENKEEL_TOOLS_GPU_DEVICE_TIMER_H_
#define EVENKEEL_TOOLS_GPU_DEVICE_TIMER_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

class DeviceTimer {
 public:
  virtual ~DeviceTimer() = default;
  virtual absl::StatusOr<double> Seconds(const std::function<absl::Status()>& work) = 0;
};

struct BenchDevice {
  DeviceRuntime* runtime = nullptr;  // This process's; never destroyed.
  Stream stream;
  std::unique_ptr<DeviceTimer> timer;
};

// The first device of `kind`: "cuda" or "simulated". FailedPrecondition where there is none,
// Unimplemented where this build has no CUDA.
absl::StatusOr<BenchDevice> OpenBenchDevice(absl::string_view kind);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_GPU_DEVICE_TIMER_H_
