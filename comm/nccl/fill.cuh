// A non-contributing rank's input to a reduction: the bytes of one element, repeated.

#ifndef EVENKEEL_COMM_NCCL_FILL_CUH_
#define EVENKEEL_COMM_NCCL_FILL_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

namespace evenkeel {
namespace kernel {

template <typename Word>
EK_DEVICE void FillWords(void* data, int64_t count, uint64_t pattern) {
  auto* const words = static_cast<Word*>(data);
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads())
    words[i] = static_cast<Word>(pattern);
}

}  // namespace kernel

// `count` elements of 1, 2, 4 or 8 bytes, which lie at a multiple of that.
EK_KERNEL(256, ek_nccl_fill)
(void* data, int64_t count, int element_bytes, uint64_t pattern) {
  if (element_bytes == 1) kernel::FillWords<uint8_t>(data, count, pattern);
  if (element_bytes == 2) kernel::FillWords<uint16_t>(data, count, pattern);
  if (element_bytes == 4) kernel::FillWords<uint32_t>(data, count, pattern);
  if (element_bytes == 8) kernel::FillWords<uint64_t>(data, count, pattern);
}

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_NCCL_FILL_CUH_
