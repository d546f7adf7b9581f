#include "evenkeel/comm/arith/finite.h"

#include "evenkeel/comm/arith/float_blocks.h"

namespace evenkeel::internal {
namespace {

// Elements that are tested together, without a branch.
constexpr int64_t kBlockElements = 256;

// `exponent`: the bits of an exponent, which are all set in a number that is not finite.
template <typename Bits>
EK_ALWAYS_INLINE bool IsNonfinite(Bits bits, Bits exponent) {
  return (bits & exponent) == exponent;
}

template <typename Bits>
EK_ALWAYS_INLINE int64_t FirstIn(const Bits* bits, int64_t count, Bits exponent) {
  int64_t begin = 0;
  for (; begin + kBlockElements <= count; begin += kBlockElements) {
    Bits found = 0;
    for (int64_t i = 0; i < kBlockElements; ++i)
      found |= static_cast<Bits>(-static_cast<Bits>(IsNonfinite(bits[begin + i], exponent)));
    if (found != 0) break;
  }
  for (int64_t i = begin; i < count; ++i) {
    if (IsNonfinite(bits[i], exponent)) return i;
  }
  return -1;
}

#if defined(__x86_64__)
template <typename Bits>
EK_TARGET_AVX2 int64_t FirstInAvx2(const Bits* bits, int64_t count, Bits exponent) {
  return FirstIn(bits, count, exponent);
}
#endif

// The test is bound by memory; wider vectors than those of AVX2 gain nothing.
template <typename Bits>
int64_t FirstOf(InstructionSet set, const void* data, int64_t count, Bits exponent) {
  const Bits* const bits = static_cast<const Bits*>(data);
#if defined(__x86_64__)
  if (set != InstructionSet::kBaseline) return FirstInAvx2(bits, count, exponent);
#endif
  return FirstIn(bits, count, exponent);
}

}  // namespace

int64_t FirstNonfiniteWith(InstructionSet set, const TensorView& data) {
  switch (data.dtype) {
    case DType::kFloat16:
      return FirstOf<uint16_t>(set, data.data, data.count, 0x7c00);
    case DType::kBFloat16:
      return FirstOf<uint16_t>(set, data.data, data.count, 0x7f80);
    case DType::kFloat32:
      return FirstOf<uint32_t>(set, data.data, data.count, 0x7f80'0000);
    case DType::kFloat64:
      return FirstOf<uint64_t>(set, data.data, data.count, 0x7ff0'0000'0000'0000);
    default:
      return -1;
  }
}

int64_t FirstNonfinite(const TensorView& data) {
  return FirstNonfiniteWith(BestInstructionSet(), data);
}

}  // namespace evenkeel::internal
