#include "evenkeel/bucket/hooks/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace evenkeel::internal {

float QuantizeBlock(Block values, Levels levels) {
  constexpr float kLargest = 127.0f;
  std::array<uint32_t, kQuantizedBlock> bits;
  std::memcpy(bits.data(), values.data(), sizeof(bits));
  uint32_t largest = 0;
  for (uint32_t one : bits)
    largest = std::max(largest, one & 0x7fffffffu);  // Without signs they sort as floats do.
  float magnitude = 0;
  std::memcpy(&magnitude, &largest, sizeof(magnitude));
  if (!std::isfinite(magnitude)) {
    std::ranges::fill(levels, int8_t{1});
    return magnitude;
  }
  const float scale = magnitude / kLargest;
  if (scale < std::numeric_limits<float>::min()) {
    std::ranges::fill(levels, int8_t{0});
    return 0.0f;
  }
  const float inverse = 1.0f / scale;
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer.
  std::array<float, kQuantizedBlock> rounded;
  for (int64_t i = 0; i < kQuantizedBlock; ++i) {
    const float level = (values[i] * inverse + kRound) - kRound;
    rounded[i] = std::min(std::max(level, -kLargest), kLargest);
  }
  for (int64_t i = 0; i < kQuantizedBlock; ++i) values[i] -= rounded[i] * scale;
  for (int64_t i = 0; i < kQuantizedBlock; ++i) levels[i] = static_cast<int8_t>(rounded[i]);
  return scale;
}

void AddLevels(ConstLevels levels, float scale, Block sum) {
  for (int64_t i = 0; i < kQuantizedBlock; ++i) sum[i] += static_cast<float>(levels[i]) * scale;
}

}  // namespace evenkeel::internal
