#include "evenkeel/comm/arith/finite.h"

#include <algorithm>

namespace evenkeel::internal {
namespace {

// Elements that are tested together, without a branch.
constexpr int64_t kBlock = 256;

// `exponent`: the bits of an exponent, which are all set in a number that is not finite.
template <typename Bits>
bool IsNonfinite(Bits bits, Bits exponent) {
  return (bits & exponent) == exponent;
}

template <typename Bits>
int64_t FirstOf(const void* data, int64_t count, Bits exponent) {
  const Bits* const bits = static_cast<const Bits*>(data);
  int64_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    Bits found = 0;
    for (int64_t i = 0; i < kBlock; ++i)
      found |= static_cast<Bits>(-static_cast<Bits>(IsNonfinite(bits[begin + i], exponent)));
    if (found != 0) break;
  }
  const Bits* const first = std::find_if(
      bits + begin, bits + count, [exponent](Bits one) { return IsNonfinite(one, exponent); });
  return first == bits + count ? -1 : first - bits;
}

}  // namespace

int64_t FirstNonfinite(const TensorView& data) {
  switch (data.dtype) {
    case DType::kFloat16:
      return FirstOf<uint16_t>(data.data, data.count, 0x7c00);
    case DType::kBFloat16:
      return FirstOf<uint16_t>(data.data, data.count, 0x7f80);
    case DType::kFloat32:
      return FirstOf<uint32_t>(data.data, data.count, 0x7f80'0000);
    case DType::kFloat64:
      return FirstOf<uint64_t>(data.data, data.count, 0x7ff0'0000'0000'0000);
    default:
      return -1;
  }
}

}  // namespace evenkeel::internal
