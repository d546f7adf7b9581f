#include "evenkeel/tools/gpu/open_device.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/cuda_if_built.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

absl::StatusOr<double> BenchDevice::Seconds(absl::FunctionRef<absl::Status()> work) const {
  constexpr absl::Duration kLongest = absl::Minutes(2);
  EK_ASSIGN_OR_RETURN(const Event begin, runtime->RecordTimed(stream.ref()));
  EK_RETURN_IF_ERROR(work());
  EK_ASSIGN_OR_RETURN(const Event end, runtime->RecordTimed(stream.ref()));
  EK_RETURN_IF_ERROR(runtime->Synchronize(end, SteadyNow() + kLongest));
  EK_ASSIGN_OR_RETURN(const absl::Duration took, runtime->Elapsed(begin, end));
  return absl::ToDoubleSeconds(took);
}

absl::StatusOr<BenchDevice> OpenBenchDevice(absl::string_view kind) {
  BenchDevice bench;
  if (kind == "simulated") {
    static SimulatedDevices* const devices = new SimulatedDevices();
    bench.runtime = devices;
  } else if (kind == "cuda") {
    EK_ASSIGN_OR_RETURN(bench.runtime, CudaIfBuilt());
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--device='", kind, "' is neither cuda nor simulated"));
  }
  EK_RETURN_IF_ERROR(bench.runtime->DeviceCount().status());
  EK_ASSIGN_OR_RETURN(bench.stream, bench.runtime->CreateStream(Device::Cuda(0)));
  return bench;
}

}  // namespace evenkeel
