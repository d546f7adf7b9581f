#include "evenkeel/tools/gpu/device_timer.h"

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tools/gpu/cuda_bench.h"

namespace evenkeel {
namespace {

constexpr absl::Duration kLongestBlock = absl::Minutes(2);

class HostTimer : public DeviceTimer {
 public:
  HostTimer(DeviceRuntime& runtime, StreamRef stream) : runtime_(runtime), stream_(stream) {}

  absl::StatusOr<double> Seconds(const std::function<absl::Status()>& work) override {
    const absl::Time begin = SteadyNow();
    EK_RETURN_IF_ERROR(work());
    EK_RETURN_IF_ERROR(runtime_.Synchronize(stream_, begin + kLongestBlock));
    return absl::ToDoubleSeconds(SteadyNow() - begin);
  }

 private:
  DeviceRuntime& runtime_;
  const StreamRef stream_;
};

DeviceRuntime* Simulated() {
  static SimulatedDevices* const devices = new SimulatedDevices();
  return devices;
}

}  // namespace

absl::StatusOr<BenchDevice> OpenBenchDevice(absl::string_view kind) {
  BenchDevice bench;
  if (kind == "simulated") {
    bench.runtime = Simulated();
  } else if (kind == "cuda") {
    EK_ASSIGN_OR_RETURN(bench.runtime, internal::CudaIfBuilt());
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--device='", kind, "' is neither cuda nor simulated"));
  }
  EK_RETURN_IF_ERROR(bench.runtime->DeviceCount().status());
  EK_ASSIGN_OR_RETURN(bench.stream, bench.runtime->CreateStream(Device::Cuda(0)));
  if (kind == "simulated") {
    bench.timer = std::make_unique<HostTimer>(*bench.runtime, bench.stream.ref());
  } else {
    EK_ASSIGN_OR_RETURN(bench.timer, internal::MakeCudaTimer(*bench.runtime, bench.stream.ref()));
  }
  return bench;
}

}  // namespace evenkeel
