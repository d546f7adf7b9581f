// Conversions of the 16-bit floats, on their bits, without a branch, so that a loop over them is
// vectorised.
//
// Rounding: to nearest even; too large values become infinity; subnormals are exact.
// NaN:      stays NaN, made quiet, with the sign and the upper bits of its payload: bit for bit the
//           result of the x86 instructions VCVTPS2PH and VCVTPH2PS.
// Source:   the float16 pair follows M. Dukhan's FP16 library: a multiplication by a power of two
//           moves the exponent, an addition of a chosen number makes the float unit round at the
//           wanted bit.

#ifndef EVENKEEL_COMM_BASE_FLOAT16_H_
#define EVENKEEL_COMM_BASE_FLOAT16_H_

#include <bit>
#include <cstdint>

namespace evenkeel::internal {

// Returns condition ? yes : no, in a form that compilers do not turn into a jump.
inline uint32_t Select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

inline float FloatFromFloat16(uint16_t bits) {
  const uint32_t shifted = static_cast<uint32_t>(bits) << 16;
  const uint32_t sign = shifted & 0x80000000u;
  const uint32_t magnitude = shifted << 1;
  const float normal = std::bit_cast<float>((magnitude >> 4) + 0x70000000u) *
                       0x1p-112f;  // Infinity and NaN as well.
  const float subnormal = std::bit_cast<float>((magnitude >> 17) | 0x3f000000u) - 0.5f;
  return std::bit_cast<float>(sign |
                              Select(magnitude < 0x08000000u, std::bit_cast<uint32_t>(subnormal),
                                     std::bit_cast<uint32_t>(normal)));
}

inline uint16_t Float16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Overflows to infinity from the first value on that rounds beyond the largest float16.
  const float scaled = (std::bit_cast<float>(magnitude) * 0x1p+112f) * 0x1p-110f;
  const uint32_t exponent = (bits << 1) & 0xff000000u;
  const uint32_t rounding_exponent =
      Select(exponent < 0x71000000u, 0x71000000u, exponent);  // Fixed below the normal range.
  const uint32_t rounded = std::bit_cast<uint32_t>(
      std::bit_cast<float>((rounding_exponent >> 1) + 0x07800000u) + scaled);
  const uint32_t finite = ((rounded >> 13) & 0x7c00u) + (rounded & 0x0fffu);
  const uint32_t nan = 0x7e00u | ((bits >> 13) & 0x03ffu);
  return static_cast<uint16_t>(sign | Select(magnitude > 0x7f800000u, nan, finite));
}

inline float FloatFromBFloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t BFloat16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t finite =
      (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // A carry moves on to the exponent.
  const uint32_t nan = (bits >> 16) | 0x0040u;
  return static_cast<uint16_t>(Select((bits & 0x7fffffffu) > 0x7f800000u, nan, finite));
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_FLOAT16_H_
