// Memory for a model's parameters, gradients and buffers.
//
//   TensorMemory memory;
//   // zeros, at a multiple of 64 bytes
//   TensorView weight = memory.Allocate(DType::kFloat32, 64 * 784);
//
// Ownership: memory that was allocated and not freed stays at its address as long as the
//            TensorMemory lives.
// Threads:   thread-compatible.

#ifndef EVENKEEL_TRAINER_LAYERS_TENSOR_MEMORY_H_
#define EVENKEEL_TRAINER_LAYERS_TENSOR_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class TensorMemory {
 public:
  TensorView Allocate(DType dtype, int64_t count) {
    const TensorView zeros = AllocateForOverwrite(dtype, count);
    std::fill_n(static_cast<std::byte*>(zeros.data), zeros.bytes(), std::byte{0});
    return zeros;
  }
  // Does not touch the memory: each page goes to the NUMA node of the thread that writes it first.
  TensorView AllocateForOverwrite(DType dtype, int64_t count) {
    const size_t bytes = std::max<size_t>(1, count * SizeOf(dtype));
    auto* data = static_cast<std::byte*>(::operator new[](bytes, kAlignment));
    blocks_.emplace_back(data);
    return TensorView(data, count, dtype);
  }
  // Frees memory that was allocated here and that is no longer used.
  void Free(const void* data) {
    std::erase_if(blocks_, [data](const auto& block) { return block.get() == data; });
  }

 private:
  // A cache line, and the widest vector register.
  static constexpr std::align_val_t kAlignment{64};
  struct Deleter {
    void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
  };
  std::vector<std::unique_ptr<std::byte[], Deleter>> blocks_;
};

// Returns the result of `make`, or ResourceExhausted with `sentence` if memory runs out.
//
//   return IfMemoryAllows("mlp: not enough memory",
//                         [&]() -> absl::StatusOr<std::unique_ptr<Model>> { ... });
//
// Threads: as `make`.
template <typename Make>
std::invoke_result_t<Make> IfMemoryAllows(absl::string_view sentence, Make make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(sentence);
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_TENSOR_MEMORY_H_
