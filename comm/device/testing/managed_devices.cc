#include "evenkeel/comm/device/testing/managed_devices.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/cuda.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

absl::Status FromCuda(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

// Memory that the host may touch while kernels run: managed, or, where a device allows that for
// none (some virtual ones), the host's own, which kernels then reach over the bus.
absl::StatusOr<std::shared_ptr<void>> TakeShared(int device, int64_t bytes) {
  EK_RETURN_IF_ERROR(FromCuda("cudaSetDevice", cudaSetDevice(device)));
  int is_managed = 0;
  EK_RETURN_IF_ERROR(
      FromCuda("cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&is_managed, cudaDevAttrConcurrentManagedAccess, device)));
  void* data = nullptr;
  if (is_managed != 0) {
    EK_RETURN_IF_ERROR(FromCuda("cudaMallocManaged", cudaMallocManaged(&data, bytes)));
    return std::shared_ptr<void>(data, [](void* memory) { cudaFree(memory); });
  }
  EK_RETURN_IF_ERROR(FromCuda("cudaHostAlloc", cudaHostAlloc(&data, bytes, cudaHostAllocMapped)));
  return std::shared_ptr<void>(data, [](void* memory) {
    cudaDeviceSynchronize();  // As cudaFree() does.
    cudaFreeHost(memory);
  });
}

}  // namespace

ManagedDevices::ManagedDevices(const SimulatedOptions& options)
    : cuda_(CudaDevices()), options_(options) {}

absl::Status ManagedDevices::Check(absl::string_view call) {
  absl::MutexLock lock(&mutex_);
  const auto failure = failures_.find(std::string(call));
  if (failure == failures_.end() || failure->second.after-- > 0) return absl::OkStatus();
  return failure->second.answer;
}

void ManagedDevices::FailNext(absl::string_view call, absl::Status answer, int after) {
  absl::MutexLock lock(&mutex_);
  failures_.erase(std::string(call));
  if (!answer.ok()) failures_.emplace(call, Failure{std::move(answer), after});
}

absl::StatusOr<Memory> ManagedDevices::Allocate(Device device, int64_t bytes) {
  EK_RETURN_IF_ERROR(Check("Allocate"));
  EK_ASSIGN_OR_RETURN(const int count, cuda_.DeviceCount());
  if (device.is_cpu() || device.index >= count)
    return cuda_.Facts(device).status();  // Not there, in its words.
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("memory of ", bytes, " bytes"));
  if (*held_ + bytes > options_.bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for ", bytes, " bytes: ", held_->load(), " of ", options_.bytes, " are taken"));
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<void> data,
                      TakeShared(device.index, std::max<int64_t>(bytes, 1)));
  std::memset(data.get(), 0, bytes);
  *held_ += bytes;
  void* const place = data.get();
  return Memory{std::shared_ptr<void>(place,
                                      [held = held_, bytes, data = std::move(data)](void*) mutable {
                                        data = nullptr;
                                        *held -= bytes;
                                      }),
                bytes};
}

absl::StatusOr<Memory> ManagedDevices::AllocatePinned(int64_t bytes) {
  EK_RETURN_IF_ERROR(Check("AllocatePinned"));
  return cuda_.AllocatePinned(bytes);
}

absl::StatusOr<Stream> ManagedDevices::CreateStream(Device device, StreamPriority priority) {
  EK_RETURN_IF_ERROR(Check("CreateStream"));
  return cuda_.CreateStream(device, priority);
}

absl::StatusOr<Event> ManagedDevices::Record(StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Record"));
  return cuda_.Record(stream);
}

absl::StatusOr<Event> ManagedDevices::RecordTimed(StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("RecordTimed"));
  return cuda_.RecordTimed(stream);
}

absl::Status ManagedDevices::Wait(StreamRef stream, const Event& event) {
  EK_RETURN_IF_ERROR(Check("Wait"));
  return cuda_.Wait(stream, event);
}

absl::Status ManagedDevices::Copy(void* to, const void* from, int64_t bytes, StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Copy"));
  ++copies_;
  return cuda_.Copy(to, from, bytes, stream);
}

absl::Status ManagedDevices::Zero(void* data, int64_t bytes, StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Zero"));
  return cuda_.Zero(data, bytes, stream);
}

absl::Status ManagedDevices::LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                                       absl::Span<void* const> args, StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Launch"));
  ++launches_;
  return cuda_.LaunchRaw(kernel, shape, args, stream);
}

absl::Status ManagedDevices::Put(StreamRef stream, std::function<void()> work) {
  EK_RETURN_IF_ERROR(Check("Put"));
  auto* const kept = new std::function<void()>(std::move(work));
  const auto run = [](void* data) {
    const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
    (*mine)();
  };
  return FromCuda("cudaLaunchHostFunc",
                  cudaLaunchHostFunc(static_cast<cudaStream_t>(stream.handle), run, kept));
}

absl::Status ManagedDevices::DoSynchronize(const Event& event, absl::Time deadline) {
  ++host_waits_;
  return cuda_.Synchronize(event, deadline);
}

}  // namespace evenkeel::internal
