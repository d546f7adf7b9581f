#include "evenkeel/comm/device/cuda_context.h"

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The devices' primary contexts, which the runtime uses as well. Retained for good.
class Contexts {
 public:
  absl::StatusOr<CUcontext> Of(Device device) {
    absl::MutexLock lock(&mutex_);
    CUcontext& context = contexts_[device.index];
    if (context != nullptr) return context;
    const CudaDriver& driver = TheDriver();
    EK_RETURN_IF_ERROR(driver.status);
    EK_RETURN_IF_ERROR(driver.Check("cuInit", driver.cuInit(0)));
    CUdevice handle = 0;
    EK_RETURN_IF_ERROR(driver.Check(ToString(device), driver.cuDeviceGet(&handle, device.index)));
    EK_RETURN_IF_ERROR(
        driver.Check(ToString(device), driver.cuDevicePrimaryCtxRetain(&context, handle)));
    return context;
  }
  Device AnyInUse() const {
    absl::MutexLock lock(&mutex_);
    for (const auto& [index, context] : contexts_) {
      if (context != nullptr) return Device::Cuda(index);
    }
    return Device::Cuda(0);
  }

 private:
  mutable absl::Mutex mutex_;
  std::map<int, CUcontext> contexts_ ABSL_GUARDED_BY(mutex_);  // By device.
};

Contexts& AllContexts() {
  static Contexts* const contexts = new Contexts;
  return *contexts;
}

absl::Status LoadDriver(CudaDriver& driver) {
  EK_ASSIGN_OR_RETURN(SharedLibrary library,
                      SharedLibrary::Load("CUDA's driver", {"libcuda.so.1"}));
  EK_FIND_FUNCTIONS(EK_CUDA_DRIVER_FUNCTIONS, library, driver);
  library.FindOptional("cuFuncLoad", driver.cuFuncLoad);
  return library.Keep(library.Name());
}

}  // namespace

absl::Status CudaDriver::Check(absl::string_view what, CUresult result) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  const std::string message =
      absl::StrCat(what, ": ", text == nullptr ? "unknown error" : text, " (", result, ")");
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  if (result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
    return absl::UnimplementedError(absl::StrCat(
        message, ": the kernels are not built for this device, or its driver is too old"));
  }
  return absl::InternalError(message);
}

const CudaDriver& TheDriver() {
  static const CudaDriver driver = [] {
    CudaDriver found;
    found.status = LoadDriver(found);
    if (!found.status.ok()) {
      found.status =
          absl::FailedPreconditionError(absl::StrCat("no CUDA device: ", found.status.message()));
    }
    return found;
  }();
  return driver;
}

Device CudaDeviceInUse() { return AllContexts().AnyInUse(); }

ScopedCudaDevice::ScopedCudaDevice(Device device) {
  const absl::StatusOr<CUcontext> context = AllContexts().Of(device);
  status_ = context.status();
  if (!status_.ok()) return;
  CUcontext current = nullptr;
  status_ = TheDriver().Check("cuCtxGetCurrent", TheDriver().cuCtxGetCurrent(&current));
  if (!status_.ok() || current == *context) return;
  status_ = TheDriver().Check("cuCtxPushCurrent", TheDriver().cuCtxPushCurrent(*context));
  is_pushed_ = status_.ok();
}

ScopedCudaDevice::~ScopedCudaDevice() {
  CUcontext popped = nullptr;
  if (is_pushed_) TheDriver().cuCtxPopCurrent(&popped);
}

}  // namespace evenkeel::internal
