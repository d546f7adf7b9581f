#include "evenkeel/trainer/layers/tensor_memory.h"

#include <algorithm>

namespace evenkeel {

TensorView TensorMemory::Allocate(DType dtype, int64_t count) {
  const size_t bytes = std::max<size_t>(1, count * SizeOf(dtype));
  auto* data = static_cast<std::byte*>(::operator new[](bytes, kAlignment));
  std::fill_n(data, bytes, std::byte{0});
  blocks_.emplace_back(data);
  return TensorView(data, count, dtype);
}

void TensorMemory::Free(const void* data) {
  std::erase_if(blocks_, [data](const auto& block) { return block.get() == data; });
}

}  // namespace evenkeel
