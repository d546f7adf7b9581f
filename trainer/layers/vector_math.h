// The exponential and bfloat16 conversions for loops of vectorised.h, without a branch or a call.
//
//   Exp(x)  // float: below 2 ulp, 0 below -87, Exp(88) above 88; double: the library's
//   Widen(element)         // to the type that one computes in
//   Narrow<O>(value)       // to the type of a matrix product's operand, to nearest, ties to even
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_LAYERS_VECTOR_MATH_H_
#define EVENKEEL_TRAINER_LAYERS_VECTOR_MATH_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vectorised.h"

namespace evenkeel {

// x = n ln 2 + r, |r| <= ln(2) / 2. exp(r) by Taylor's series, whose error at degree 7 is below
// 6e-9 there; 2^n by adding n to the exponent. ln 2 is subtracted in two parts, of which the first
// times n is exact.
EK_ALWAYS_INLINE float Exp(float x) {
  constexpr float kLowest = -87.0f, kHighest = 88.0f;
  // Added to a float, it leaves the nearest integer in the lowest bits.
  constexpr float kShift = 0x1.8p23f;
  const float within = x < kLowest ? kLowest : (x > kHighest ? kHighest : x);
  const float shifted = within * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  float sum = 1.0f / 5040;
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const float power =
      std::bit_cast<float>(std::bit_cast<uint32_t>(sum) + (std::bit_cast<uint32_t>(shifted) << 23));
  return x < kLowest ? 0.0f : power;
}

EK_ALWAYS_INLINE double Exp(double x) { return std::exp(x); }

EK_ALWAYS_INLINE double Widen(double value) { return value; }
EK_ALWAYS_INLINE float Widen(float value) { return value; }
EK_ALWAYS_INLINE float Widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(uint32_t{value.bits} << 16));
}

template <typename O, typename T>
EK_ALWAYS_INLINE O Narrow(T value) {
  if constexpr (std::is_same_v<O, T>) {
    return value;
  } else {
    static_assert(std::is_same_v<O, BFloat16> && std::is_same_v<T, float>);
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;  // For a NaN, which rounding could make infinite.
    O narrow;
    narrow.bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
    return narrow;
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_VECTOR_MATH_H_
