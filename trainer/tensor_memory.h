// Memory for a model's parameters, gradients and buffers.
//
//   TensorMemory memory;
//   TensorView weight = memory.Allocate(DType::kFloat32, 64 * 784);  // zeros, at a multiple of 64 bytes
//
// Ownership: what was allocated and not freed lives, at the same address, as long as the TensorMemory.
// Threads:   thread-compatible.

#ifndef EVENKEEL_TRAINER_TENSOR_MEMORY_H_
#define EVENKEEL_TRAINER_TENSOR_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "evenkeel/comm/types.h"

namespace evenkeel {

class TensorMemory {
 public:
  static constexpr std::align_val_t kAlignment{64};  // A cache line, and the widest vector register.

  TensorView Allocate(DType dtype, int64_t count);
  // Of what Allocate() gave, which nobody uses any more.
  void Free(const void* data);

 private:
  struct Deleter {
    void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
  };
  std::vector<std::unique_ptr<std::byte[], Deleter>> blocks_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TENSOR_MEMORY_H_
