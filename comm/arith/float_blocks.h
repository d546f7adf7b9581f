// Blocks of any float type as floats to compute with, and back: what loops over tensors of 16-bit
// floats share.
//
//   template <typename Set, typename T>                     // Set: Baseline, Avx2, Avx512
//   EK_ALWAYS_INLINE void Double(T* data, int64_t n) {      // n <= kBlock
//     alignas(64) Carrier<T> buffer[kBlock];
//     // where it lies, if no conversion is needed
//     const Carrier<T>* in = Load<Set>(data, buffer, n);
//     for (int64_t i = 0; i < n; ++i) buffer[i] = 2 * in[i];
//     Store<Set>(buffer, data, n);
//   }
//   EK_TARGET_AVX2 void DoubleAvx2(float* data, int64_t n) { Double<Avx2>(data, n); }
//
// An always_inline template takes on the instruction set of the function around it, which is chosen
// by hand at run time (instruction_set.h). Compile what uses this with -O3, and without
// contraction, which would round differently.
//
// Rounding: float16.h, on each set bit for bit.

#ifndef EVENKEEL_COMM_ARITH_FLOAT_BLOCKS_H_
#define EVENKEEL_COMM_ARITH_FLOAT_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "evenkeel/comm/base/float16.h"
#include "evenkeel/comm/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EK_ALWAYS_INLINE inline __attribute__((always_inline))

// The next loop's iterations are independent, also if two of its pointers are equal.
#if defined(__clang__)
#define EK_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define EK_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace evenkeel::internal {

constexpr int64_t kBlock =
    1024;  // Elements; two blocks of float64 fit into a third of the smallest usual L1 cache.

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// The type in which T is computed.
template <typename T>
using Carrier = std::conditional_t<kIsHalf<T>, float, T>;

// How each instruction set converts a block of float16. bfloat16 needs no instruction of its own.
struct Baseline {
  static void Widen(const Float16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = FloatFromFloat16(from[i].bits);
  }
  static void Narrow(const float* from, Float16* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i].bits = Float16FromFloat(from[i]);
  }
};

#if defined(__x86_64__)
#define EK_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#define EK_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))

struct Avx2 {
  EK_TARGET_AVX2 static void Widen(const Float16* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
    }
    for (; i < n; ++i) to[i] = FloatFromFloat16(from[i].bits);
  }
  EK_TARGET_AVX2 static void Narrow(const float* from, Float16* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
    for (; i < n; ++i) to[i].bits = Float16FromFloat(from[i]);
  }
};

struct Avx512 {
  static constexpr __mmask16 kAllLanes =
      0xffff;  // GCC 12 warns about what the unmasked intrinsics leave undefined.

  EK_TARGET_AVX512 static void Widen(const Float16* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(kAllLanes, half));
    }
    for (; i < n; ++i) to[i] = FloatFromFloat16(from[i].bits);
  }
  EK_TARGET_AVX512 static void Narrow(const float* from, Float16* to, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      const __m256i half =
          _mm512_maskz_cvtps_ph(kAllLanes, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), half);
    }
    for (; i < n; ++i) to[i].bits = Float16FromFloat(from[i]);
  }
};
#endif

// A block as carriers: where it lies if no conversion is needed, else in `buffer`.
template <typename Set, typename T>
EK_ALWAYS_INLINE const Carrier<T>* Load(const T* from, Carrier<T>* buffer, int64_t n) {
  if constexpr (std::is_same_v<T, Float16>) {
    Set::Widen(from, buffer, n);
    return buffer;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = FloatFromBFloat16(from[i].bits);
    return buffer;
  } else {
    return from;
  }
}

// The block of carriers that was made for `to` arrives there; carriers of the same type may lie
// there already.
template <typename Set, typename T>
EK_ALWAYS_INLINE void Store(const Carrier<T>* from, T* to, int64_t n) {
  if constexpr (std::is_same_v<T, Float16>) {
    Set::Narrow(from, to, n);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t i = 0; i < n; ++i) to[i].bits = BFloat16FromFloat(from[i]);
  } else {
    if (from != to) std::copy(from, from + n, to);
  }
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_FLOAT_BLOCKS_H_
