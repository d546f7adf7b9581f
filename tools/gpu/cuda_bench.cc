#include "evenkeel/tools/gpu/cuda_bench.h"

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kLongestBlock = absl::Minutes(2);

absl::Status FromCuda(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

struct EventDeleter {
  void operator()(CUevent_st* event) const { cudaEventDestroy(event); }
};
using UniqueEvent = std::unique_ptr<CUevent_st, EventDeleter>;

absl::StatusOr<UniqueEvent> MakeEvent() {
  cudaEvent_t event = nullptr;
  EK_RETURN_IF_ERROR(FromCuda("cudaEventCreate", cudaEventCreate(&event)));
  return UniqueEvent(event);
}

class CudaTimer : public DeviceTimer {
 public:
  CudaTimer(DeviceRuntime& runtime, StreamRef stream, UniqueEvent begin, UniqueEvent end)
      : runtime_(runtime), stream_(stream), begin_(std::move(begin)), end_(std::move(end)) {}

  absl::StatusOr<double> Seconds(const std::function<absl::Status()>& work) override {
    auto* const stream = static_cast<cudaStream_t>(stream_.handle);
    EK_RETURN_IF_ERROR(FromCuda("cudaEventRecord", cudaEventRecord(begin_.get(), stream)));
    EK_RETURN_IF_ERROR(work());
    EK_RETURN_IF_ERROR(FromCuda("cudaEventRecord", cudaEventRecord(end_.get(), stream)));
    EK_RETURN_IF_ERROR(runtime_.Synchronize(stream_, SteadyNow() + kLongestBlock));
    float milliseconds = 0;
    EK_RETURN_IF_ERROR(FromCuda("cudaEventElapsedTime",
                                cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get())));
    return milliseconds / 1e3;
  }

 private:
  DeviceRuntime& runtime_;
  const StreamRef stream_;
  const UniqueEvent begin_, end_;
};

}  // namespace

absl::StatusOr<DeviceRuntime*> CudaIfBuilt() { return &CudaDevices(); }

absl::StatusOr<std::unique_ptr<DeviceTimer>> MakeCudaTimer(DeviceRuntime& runtime,
                                                           StreamRef stream) {
  EK_RETURN_IF_ERROR(FromCuda("cudaSetDevice", cudaSetDevice(stream.device.index)));
  EK_ASSIGN_OR_RETURN(UniqueEvent begin, MakeEvent());
  EK_ASSIGN_OR_RETURN(UniqueEvent end, MakeEvent());
  return std::make_unique<CudaTimer>(runtime, stream, std::move(begin), std::move(end));
}

}  // namespace evenkeel::internal
