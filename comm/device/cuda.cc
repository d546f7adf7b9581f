// CUDA's runtime for memory, streams and events; the driver for kernels, because their images are
// data that only the driver can load, and for contexts (cuda_context.h).

#include "evenkeel/comm/device/cuda.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/cuda_context.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using internal::ScopedCudaDevice;
using internal::TheDriver;
using Driver = internal::CudaDriver;

absl::Status FromCuda(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text =
      absl::StrCat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  switch (error) {
    case cudaErrorInsufficientDriver:
      if (int version = 0; cudaDriverGetVersion(&version) == cudaSuccess && version == 0) {
        return absl::FailedPreconditionError("no CUDA device: there is no driver (libcuda.so.1)");
      }
      [[fallthrough]];
    case cudaErrorNoDevice:
    case cudaErrorSystemDriverMismatch:
      return absl::FailedPreconditionError(
          absl::StrCat("no CUDA device: ", cudaGetErrorString(error)));
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(text);
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevice:
      return absl::InvalidArgumentError(text);
    default:
      return absl::InternalError(text);
  }
}

// For calls that have nothing to do with what another thread may be capturing into a graph, but
// would end it.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaStream_t StreamOf(StreamRef stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t EventOf(const Event& event) { return static_cast<cudaEvent_t>(event.handle.get()); }

class CudaRuntime : public DeviceRuntime {
 public:
  absl::string_view name() const override { return "cuda"; }
  absl::StatusOr<int> DeviceCount() override;
  absl::StatusOr<DeviceFacts> Facts(Device device) override;
  absl::StatusOr<Memory> Allocate(Device device, int64_t bytes) override;
  absl::StatusOr<Memory> AllocatePinned(int64_t bytes) override;
  absl::StatusOr<Stream> CreateStream(Device device, StreamPriority priority) override;
  absl::StatusOr<Event> Record(StreamRef stream) override;
  absl::Status Wait(StreamRef stream, const Event& event) override;
  absl::StatusOr<bool> IsDone(const Event& event) override;
  absl::StatusOr<Event> RecordTimed(StreamRef stream) override;
  absl::Status Copy(void* to, const void* from, int64_t bytes, StreamRef stream) override;
  absl::Status Zero(void* data, int64_t bytes, StreamRef stream) override;
  absl::Status LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                         absl::Span<void* const> args, StreamRef stream) override;
  int64_t host_waits() const override { return host_waits_; }

 private:
  absl::Status DoSynchronize(const Event& event, absl::Time deadline) override;
  absl::StatusOr<absl::Duration> DoElapsed(const Event& from, const Event& to) override;

  // OK if the device is there.
  absl::Status Check(Device device);
  absl::StatusOr<Event> TakeEvent(Device device, bool is_timed);
  absl::StatusOr<Event> RecordAs(StreamRef stream, bool is_timed);
  absl::StatusOr<CUfunction> FunctionOf(const DeviceKernel& kernel, Device device);

  std::atomic<int64_t> host_waits_ = 0;
  absl::Mutex mutex_;
  std::map<std::pair<int, bool>, std::vector<cudaEvent_t>> free_events_
      ABSL_GUARDED_BY(mutex_);  // By device, timed.
  std::map<std::pair<int, const DeviceImage*>, CUmodule> modules_
      ABSL_GUARDED_BY(mutex_);  // By device.
  std::map<std::pair<int, const DeviceKernel*>, CUfunction> functions_
      ABSL_GUARDED_BY(mutex_);  // By device.
};

absl::StatusOr<int> CudaRuntime::DeviceCount() {
  int count = 0;
  EK_RETURN_IF_ERROR(FromCuda("cudaGetDeviceCount", cudaGetDeviceCount(&count)));
  if (count == 0)
    return absl::FailedPreconditionError("no CUDA device: none is visible to this process");
  return count;
}

absl::Status CudaRuntime::Check(Device device) {
  EK_ASSIGN_OR_RETURN(const int count, DeviceCount());
  if (!device.is_cpu() && device.index >= 0 && device.index < count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there is no ", ToString(device), ", but ", count, " CUDA devices"));
}

absl::StatusOr<DeviceFacts> CudaRuntime::Facts(Device device) {
  EK_RETURN_IF_ERROR(Check(device));
  const ScopedCudaDevice scope(device);
  EK_RETURN_IF_ERROR(scope.status());
  cudaDeviceProp properties;
  EK_RETURN_IF_ERROR(
      FromCuda("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device.index)));
  size_t free_bytes = 0, total_bytes = 0;
  EK_RETURN_IF_ERROR(FromCuda("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes)));
  return DeviceFacts{.name = properties.name,
                     .total_bytes = static_cast<int64_t>(total_bytes),
                     .free_bytes = static_cast<int64_t>(free_bytes),
                     .multiprocessors = properties.multiProcessorCount,
                     .compute_capability = 10 * properties.major + properties.minor};
}

absl::StatusOr<Memory> CudaRuntime::Allocate(Device device, int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Allocate: ", bytes, " bytes"));
  EK_RETURN_IF_ERROR(Check(device));
  const ScopedCudaDevice scope(device);
  EK_RETURN_IF_ERROR(scope.status());
  const BesideCaptures beside;
  EK_ASSIGN_OR_RETURN(const Stream stream, CreateStream(device, StreamPriority::kNormal));
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, std::max<int64_t>(bytes, 1));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // This one is no trouble of later calls.
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", bytes, " bytes on ", ToString(device)));
  }
  EK_RETURN_IF_ERROR(FromCuda("cudaMalloc", error));
  Memory memory{std::shared_ptr<void>(data,
                                      [device](void* freed) {
                                        const ScopedCudaDevice scope(device);
                                        const BesideCaptures beside;
                                        cudaFree(freed);
                                      }),
                bytes};
  // Whoever gets it may use any stream, so it is zeroed for good. On a stream of its own: nobody
  // else's work is waited for, also where a thread captures a graph.
  EK_RETURN_IF_ERROR(Zero(data, bytes, stream.ref()));
  EK_RETURN_IF_ERROR(
      FromCuda("cudaStreamSynchronize", cudaStreamSynchronize(StreamOf(stream.ref()))));
  return memory;
}

absl::StatusOr<Memory> CudaRuntime::AllocatePinned(int64_t bytes) {
  if (bytes < 0)
    return absl::InvalidArgumentError(absl::StrCat("AllocatePinned: ", bytes, " bytes"));
  const Device any = internal::CudaDeviceInUse();
  EK_RETURN_IF_ERROR(Check(any));
  const ScopedCudaDevice scope(any);
  EK_RETURN_IF_ERROR(scope.status());
  const BesideCaptures beside;
  void* data = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&data, std::max<int64_t>(bytes, 1), cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return absl::ResourceExhaustedError(absl::StrCat("no pinned memory for ", bytes, " bytes"));
  }
  EK_RETURN_IF_ERROR(FromCuda("cudaHostAlloc", error));
  std::memset(data, 0, bytes);
  return Memory{std::shared_ptr<void>(data,
                                      [any](void* freed) {
                                        const ScopedCudaDevice scope(any);
                                        const BesideCaptures beside;
                                        cudaFreeHost(freed);
                                      }),
                bytes};
}

absl::StatusOr<Stream> CudaRuntime::CreateStream(Device device, StreamPriority priority) {
  EK_RETURN_IF_ERROR(Check(device));
  const ScopedCudaDevice scope(device);
  EK_RETURN_IF_ERROR(scope.status());
  int lowest = 0, highest = 0;
  EK_RETURN_IF_ERROR(FromCuda("cudaDeviceGetStreamPriorityRange",
                              cudaDeviceGetStreamPriorityRange(&lowest, &highest)));
  cudaStream_t stream = nullptr;
  EK_RETURN_IF_ERROR(
      FromCuda("cudaStreamCreate",
               cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                            priority == StreamPriority::kHigh ? highest : lowest)));
  return Stream{std::shared_ptr<void>(stream,
                                      [device](void* gone) {
                                        const ScopedCudaDevice scope(device);
                                        cudaStreamDestroy(
                                            static_cast<cudaStream_t>(gone));  // Waits for nothing.
                                      }),
                device};
}

absl::StatusOr<Event> CudaRuntime::TakeEvent(Device device, bool is_timed) {
  cudaEvent_t event = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    std::vector<cudaEvent_t>& free = free_events_[{device.index, is_timed}];
    if (!free.empty()) {
      event = free.back();
      free.pop_back();
    }
  }
  if (event == nullptr) {
    const unsigned flags = is_timed ? cudaEventDefault : cudaEventDisableTiming;
    EK_RETURN_IF_ERROR(FromCuda("cudaEventCreate", cudaEventCreateWithFlags(&event, flags)));
  }
  // Whoever waits for it has been told so already, so it may be recorded anew.
  return Event{
      std::shared_ptr<void>(
          event,
          [this, device, is_timed](void* freed) {
            absl::MutexLock lock(&mutex_);
            free_events_[{device.index, is_timed}].push_back(static_cast<cudaEvent_t>(freed));
          }),
      device, is_timed};
}

absl::StatusOr<Event> CudaRuntime::RecordAs(StreamRef stream, bool is_timed) {
  const ScopedCudaDevice scope(stream.device);
  EK_RETURN_IF_ERROR(scope.status());
  EK_ASSIGN_OR_RETURN(Event event, TakeEvent(stream.device, is_timed));
  EK_RETURN_IF_ERROR(
      FromCuda("cudaEventRecord", cudaEventRecord(EventOf(event), StreamOf(stream))));
  return event;
}

absl::StatusOr<Event> CudaRuntime::Record(StreamRef stream) {
  return RecordAs(stream, /*is_timed=*/false);
}

absl::StatusOr<Event> CudaRuntime::RecordTimed(StreamRef stream) {
  return RecordAs(stream, /*is_timed=*/true);
}

absl::StatusOr<absl::Duration> CudaRuntime::DoElapsed(const Event& from, const Event& to) {
  const ScopedCudaDevice scope(from.device);
  EK_RETURN_IF_ERROR(scope.status());
  float milliseconds = 0;
  EK_RETURN_IF_ERROR(FromCuda("cudaEventElapsedTime",
                              cudaEventElapsedTime(&milliseconds, EventOf(from), EventOf(to))));
  return absl::Milliseconds(milliseconds);
}

absl::Status CudaRuntime::Wait(StreamRef stream, const Event& event) {
  if (!event) return absl::OkStatus();
  const ScopedCudaDevice scope(stream.device);
  EK_RETURN_IF_ERROR(scope.status());
  return FromCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(StreamOf(stream), EventOf(event), 0));
}

absl::StatusOr<bool> CudaRuntime::IsDone(const Event& event) {
  if (!event) return true;
  const ScopedCudaDevice scope(event.device);
  EK_RETURN_IF_ERROR(scope.status());
  const BesideCaptures beside;
  const cudaError_t state = cudaEventQuery(EventOf(event));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // An answer, not an error of later calls.
    return false;
  }
  EK_RETURN_IF_ERROR(FromCuda(ToString(event.device), state));
  return true;
}

absl::Status CudaRuntime::DoSynchronize(const Event& event, absl::Time deadline) {
  constexpr absl::Duration kSpins = absl::Microseconds(50), kLongestPause = absl::Microseconds(50);
  ++host_waits_;
  const absl::Time begin = SteadyNow();
  for (absl::Duration pause = absl::Microseconds(10);; pause = std::min(2 * pause, kLongestPause)) {
    EK_ASSIGN_OR_RETURN(const bool is_done, IsDone(event));
    if (is_done) return absl::OkStatus();
    const absl::Time now = SteadyNow();
    if (now > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(ToString(event.device), " was not done in time"));
    }
    if (now - begin < kSpins) {
      std::this_thread::yield();
    } else {
      absl::SleepFor(pause);
    }
  }
}

absl::Status CudaRuntime::Copy(void* to, const void* from, int64_t bytes, StreamRef stream) {
  if (bytes == 0) return absl::OkStatus();
  const ScopedCudaDevice scope(stream.device);
  EK_RETURN_IF_ERROR(scope.status());
  return FromCuda("cudaMemcpyAsync",
                  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, StreamOf(stream)));
}

absl::Status CudaRuntime::Zero(void* data, int64_t bytes, StreamRef stream) {
  if (bytes == 0) return absl::OkStatus();
  const ScopedCudaDevice scope(stream.device);
  EK_RETURN_IF_ERROR(scope.status());
  return FromCuda("cudaMemsetAsync", cudaMemsetAsync(data, 0, bytes, StreamOf(stream)));
}

// Called with the kernel's device current.
absl::StatusOr<CUfunction> CudaRuntime::FunctionOf(const DeviceKernel& kernel, Device device) {
  absl::MutexLock lock(&mutex_);
  const auto known = functions_.find({device.index, &kernel});
  if (known != functions_.end()) return known->second;
  if (kernel.image->size == 0) {
    return absl::UnimplementedError(absl::StrCat(
        kernel.name,
        ": built without CUDA's compiler: install the CUDA toolkit, set CUDA_HOME unless it is in "
        "/usr/local/cuda, and build again"));
  }
  const Driver& driver = TheDriver();
  EK_RETURN_IF_ERROR(driver.status);
  CUmodule& module = modules_[{device.index, kernel.image}];
  if (module == nullptr) {
    EK_RETURN_IF_ERROR(driver.Check(absl::StrCat(kernel.name, " on ", ToString(device)),
                                    driver.cuModuleLoadData(&module, kernel.image->data)));
  }
  CUfunction function = nullptr;
  EK_RETURN_IF_ERROR(driver.Check(absl::StrCat("the kernel ", kernel.name),
                                  driver.cuModuleGetFunction(&function, module, kernel.name)));
  // Now, and not with the first launch, which may come while a collective on the device waits for
  // another rank.
  if (driver.cuFuncLoad != nullptr) {
    EK_RETURN_IF_ERROR(
        driver.Check(absl::StrCat("the kernel ", kernel.name), driver.cuFuncLoad(function)));
  }
  functions_[{device.index, &kernel}] = function;
  return function;
}

absl::Status CudaRuntime::LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                                    absl::Span<void* const> args, StreamRef stream) {
  // The driver refuses these with "invalid argument", or misses them: it takes 32 bits.
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1, kMostRows = 65535;
  if (shape.blocks < 1 || shape.blocks > kMostBlocks || shape.rows < 1 || shape.rows > kMostRows) {
    return absl::InvalidArgumentError(
        absl::StrCat(kernel.name, ": cannot launch ", shape.blocks, " x ", shape.rows, " blocks"));
  }
  const ScopedCudaDevice scope(stream.device);
  EK_RETURN_IF_ERROR(scope.status());
  EK_ASSIGN_OR_RETURN(CUfunction function, FunctionOf(kernel, stream.device));
  return TheDriver().Check(
      kernel.name,
      TheDriver().cuLaunchKernel(
          function, static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.rows), 1,
          static_cast<unsigned>(shape.threads), 1, 1, /*sharedMemBytes=*/0,
          static_cast<CUstream>(stream.handle), const_cast<void**>(args.data()), nullptr));
}

}  // namespace

DeviceRuntime& CudaDevices() {
  static DeviceRuntime* const runtime = new CudaRuntime;
  return *runtime;
}

}  // namespace evenkeel
