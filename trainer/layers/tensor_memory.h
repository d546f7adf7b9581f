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

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "evenkeel/comm/types.h"

namespace evenkeel {

class TensorMemory {
 public:
  static constexpr std::align_val_t kAlignment{
      64};  // A cache line, and the widest vector register.

  TensorView Allocate(DType dtype, int64_t count);
  // Frees memory that Allocate() returned and that is no longer used.
  void Free(const void* data);

 private:
  struct Deleter {
    void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
  };
  std::vector<std::unique_ptr<std::byte[], Deleter>> blocks_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_TENSOR_MEMORY_H_
