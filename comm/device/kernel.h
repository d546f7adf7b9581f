// Kernels, written once for nvcc and for the host.
//
//   // scale.cuh: compiled by nvcc into an image, and by the C++ compiler for simulated devices and
//     tests
//   EK_KERNEL(256, ek_scale)(float* data, int64_t count, float factor) {
//     for (int64_t i = kernel::GlobalIndex(); i < count; i += kernel::GlobalThreads())
//       data[i] *= factor;
//   }
//
//   // scale.cc; in BUILD cuda_library(name = "scale_kernels", src = "scale.cuh"), which is in
//   // @evenkeel//third_party/cuda:cuda_library.bzl, makes a header; in any workspace both headers
//   // are included as evenkeel/<package>/...
//   #include "evenkeel/.../scale.cuh"
//   #include "evenkeel/.../scale_kernels_image.h"
//   const auto kScale = MakeKernel<&ek_scale>("ek_scale", scale_kernels_image);
//   EK_RETURN_IF_ERROR(Launch(runtime, kScale, {.blocks = 64}, stream, data, count, 0.5f));
//
// The image is data: whoever links a kernel does not link CUDA. The CUDA runtime loads it when the
// kernel is first launched on a device; a build without a toolkit has an empty one, and says so
// there.
//
// A kernel outlives its launches: make it a constant of a namespace or a function.
//
// A kernel's source sees this header, <cstdint>, and plain structs; its arguments are trivially
// copyable. What follows is what it may use of the device; on the host each has the same meaning. A
// kernel that uses what waits for other threads (SyncThreads, Warp..., Block...) is made with
// kSynchronises, and all of a block's threads must come there.
//
// Names: a kernel's name is global ("extern C"): prefix it; ek_ is evenkeel's.

#ifndef EVENKEEL_COMM_DEVICE_KERNEL_H_
#define EVENKEEL_COMM_DEVICE_KERNEL_H_

#include <cstdint>

#include "evenkeel/comm/device/kernel_language.h"

#ifndef __CUDACC__

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/kernel_on_host.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

// The output of nvcc for one source, for all architectures; empty without a toolkit.
struct DeviceImage {
  const unsigned char* data = nullptr;
  int64_t size = 0;
};

enum class KernelKind : uint8_t {
  kIndependent,   // No thread waits for another.
  kSynchronises,  // Threads of a block wait for each other.
};

struct DeviceKernel {
  const char* name = "";
  const DeviceImage* image = nullptr;
  KernelKind kind = KernelKind::kIndependent;
  void (*on_host)(void* const* args) = nullptr;  // One thread's part.
  const int64_t* argument_bytes = nullptr;       // By argument.
};

template <typename... Params>
struct Kernel : DeviceKernel {};

namespace internal {
template <typename... Params>
Kernel<Params...> KernelTypeOf(void (*)(Params...));

template <typename... Params>
inline constexpr int64_t kArgumentBytes[sizeof...(Params) + 1] = {sizeof(Params)..., 0};

template <typename... Params>
constexpr const int64_t* ArgumentBytesOf(void (*)(Params...)) {
  static_assert((std::is_trivially_copyable_v<Params> && ...),
                "a kernel's arguments are copied as bytes");
  return kArgumentBytes<Params...>;
}

template <auto kFunction, typename... Params>
void CallKernel(void (*)(Params...), void* const* args) {
  [args]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    kFunction(*static_cast<Params*>(args[kIndex])...);
  }
  (std::index_sequence_for<Params...>());
}
}  // namespace internal

template <auto kFunction>
constexpr auto MakeKernel(const char* name, const DeviceImage& image,
                          KernelKind kind = KernelKind::kIndependent) {
  decltype(internal::KernelTypeOf(kFunction)) kernel;
  kernel.name = name;
  kernel.image = &image;
  kernel.kind = kind;
  kernel.argument_bytes = internal::ArgumentBytesOf(kFunction);
  kernel.on_host = [](void* const* args) { internal::CallKernel<kFunction>(kFunction, args); };
  return kernel;
}

// Nothing is launched for no blocks.
template <typename... Params, typename... Args>
absl::Status Launch(DeviceRuntime& runtime, const Kernel<Params...>& kernel,
                    const LaunchShape& shape, StreamRef stream, Args&&... args) {
  if (shape.blocks == 0 || shape.rows == 0) return absl::OkStatus();
  std::tuple<Params...> values(static_cast<Params>(args)...);
  return std::apply(
      [&](auto&... value) {
        const std::array<void*, sizeof...(Params)> pointers{static_cast<void*>(&value)...};
        return runtime.LaunchRaw(kernel, shape, pointers, stream);
      },
      values);
}

// Blocks for a loop over `count` elements of which each thread takes `per_thread` at a time: enough
// to fill any device, no more than it takes.
inline LaunchShape ShapeFor(int64_t count, int per_thread = 1, int threads = 256) {
  const int64_t blocks =
      (count + int64_t{threads} * per_thread - 1) / (int64_t{threads} * per_thread);
  constexpr int64_t kMostBlocks = 132 * 16;  // Sixteen for each multiprocessor of a large device.
  return {.blocks = blocks < kMostBlocks ? blocks : kMostBlocks, .threads = threads};
}

}  // namespace evenkeel

#endif  // __CUDACC__

#endif  // EVENKEEL_COMM_DEVICE_KERNEL_H_
