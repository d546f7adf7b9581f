#include "evenkeel/comm/device/cuda_context.h"

#include <dlfcn.h>

#include <map>
#include <string>
#include <type_traits>

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
    EK_RETURN_IF_ERROR(driver.Check("cuInit", driver.init(0)));
    CUdevice handle = 0;
    EK_RETURN_IF_ERROR(driver.Check(ToString(device), driver.device_get(&handle, device.index)));
    EK_RETURN_IF_ERROR(
        driver.Check(ToString(device), driver.primary_context_retain(&context, handle)));
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

}  // namespace

absl::Status CudaDriver::Check(absl::string_view what, CUresult result) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  get_error_string(result, &text);
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
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // Stays.
    if (library == nullptr) {
      found.status =
          absl::FailedPreconditionError(absl::StrCat("no CUDA device: no driver: ", dlerror()));
      return found;
    }
    const auto find = [&](const char* name, auto& function) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr)
        found.status.Update(absl::InternalError(absl::StrCat("libcuda.so.1 has no ", name)));
    };
    find("cuInit", found.init);
    find("cuDeviceGet", found.device_get);
    find("cuDevicePrimaryCtxRetain", found.primary_context_retain);
    find("cuCtxGetCurrent", found.context_get_current);
    find("cuCtxPushCurrent_v2", found.context_push_current);  // As cuda.h calls them.
    find("cuCtxPopCurrent_v2", found.context_pop_current);
    find("cuModuleLoadData", found.module_load_data);
    find("cuModuleGetFunction", found.module_get_function);
    find("cuLaunchKernel", found.launch_kernel);
    find("cuGetErrorString", found.get_error_string);
    found.function_load =
        reinterpret_cast<decltype(found.function_load)>(dlsym(library, "cuFuncLoad"));
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
  status_ = TheDriver().Check("cuCtxGetCurrent", TheDriver().context_get_current(&current));
  if (!status_.ok() || current == *context) return;
  status_ = TheDriver().Check("cuCtxPushCurrent", TheDriver().context_push_current(*context));
  is_pushed_ = status_.ok();
}

ScopedCudaDevice::~ScopedCudaDevice() {
  CUcontext popped = nullptr;
  if (is_pushed_) TheDriver().context_pop_current(&popped);
}

}  // namespace evenkeel::internal
