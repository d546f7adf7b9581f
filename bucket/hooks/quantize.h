// Floats as 8-bit integers times a scale per block.
//
//   const float scale = QuantizeBlock(values, levels);   // values: what was left out
//   AddLevels(levels, scale, sum);                       // sum += levels * scale
//
// Rounding: a level is the nearest integer in [-127, 127], ties to even; the largest magnitude is
//           exact to a rounding.
// Threads:  pure functions on the caller's memory.

#ifndef EVENKEEL_BUCKET_HOOKS_QUANTIZE_H_
#define EVENKEEL_BUCKET_HOOKS_QUANTIZE_H_

#include <cstdint>
#include <span>

namespace evenkeel::internal {

inline constexpr int64_t kQuantizedBlock = 256;  // Elements that share a scale.
using Block = std::span<float, kQuantizedBlock>;
using Levels = std::span<int8_t, kQuantizedBlock>;
using ConstLevels = std::span<const int8_t, kQuantizedBlock>;

// Answers the scale. A block that is not finite answers a scale that is not finite either, with
// levels of 1, and keeps its values; one that is too small for a scale answers 0, and keeps them
// too.
float QuantizeBlock(Block values, Levels levels);

void AddLevels(ConstLevels levels, float scale, Block sum);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_BUCKET_HOOKS_QUANTIZE_H_
