#include "evenkeel/comm/internal/reduce_kernels.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/float16.h"
#include "evenkeel/comm/types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// The work goes block by block: a block of every input passes through the first-level cache once, and one instruction
// set's copy of the same plain loops, vectorised by the compiler, combines them. The loops are always_inline templates,
// so that they take on the instruction set of the function around them; that one is chosen by hand at run time, because
// an ifunc's resolver runs before a sanitizer is ready. This file is compiled without contraction of a * b + c, which
// would round differently where the processor has it.

#define EK_ALWAYS_INLINE inline __attribute__((always_inline))

// The next loop's iterations are independent, also if two of its pointers are equal.
#if defined(__clang__)
#define EK_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define EK_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace evenkeel::internal {
namespace {

constexpr int64_t kBlock = 1024;  // Elements; two blocks of float64 fit into a third of the smallest usual L1 cache.

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// The type in which T is combined.
template <typename T>
using Carrier = std::conditional_t<kIsHalf<T>, float, T>;

// The type whose arithmetic wraps around for T, without the promotion of short types to int.
template <typename T>
using Wrapping = std::common_type_t<std::make_unsigned_t<T>, unsigned>;

struct Sum {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
    return a + b;
  }
};

struct Product {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b));
    return a * b;
  }
};

// If b is NaN the comparison is false and gives b; if a is NaN the second test gives a.
struct Min {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct BitOr {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    return static_cast<T>(a | b);
  }
};

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
  static constexpr __mmask16 kAllLanes = 0xffff;  // GCC 12 warns about what the unmasked intrinsics leave undefined.

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
      const __m256i half = _mm512_maskz_cvtps_ph(kAllLanes, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
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

// The block of carriers that was made for `to` arrives there; carriers of the same type may lie there already.
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

template <typename Op, typename C>
EK_ALWAYS_INLINE void CombineBlock(const C* a, const C* b, C* out, int64_t n) {
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) out[i] = Op::Combine(a[i], b[i]);
}

template <typename Op, typename C>
EK_ALWAYS_INLINE void CombineAndScaleBlock(const C* a, const C* b, C* out, int64_t n, C factor) {
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) out[i] = Op::Combine(a[i], b[i]) * factor;
}

template <typename C>
EK_ALWAYS_INLINE void ScaleBlock(const C* in, C* out, int64_t n, C factor) {
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * factor;
}

template <typename Set, typename Op, typename T>
EK_ALWAYS_INLINE void ReduceBlocks(void* out, std::span<const void* const> in, int64_t n, double scale) {
  using C = Carrier<T>;
  constexpr bool kInPlace = std::is_same_v<C, T>;  // The last combination can write to `out` itself.
  alignas(64) C sum_buffer[kBlock];
  alignas(64) C next_buffer[kIsHalf<T> ? kBlock : 1];

  const bool is_scaled = std::is_floating_point_v<C> && scale != 1.0;
  [[maybe_unused]] const C factor = static_cast<C>(scale);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t length = std::min(kBlock, n - begin);
    T* const out_block = static_cast<T*>(out) + begin;
    C* const result = kInPlace ? reinterpret_cast<C*>(out_block) : sum_buffer;
    const C* sum = Load<Set>(static_cast<const T*>(in[0]) + begin, sum_buffer, length);
    for (size_t k = 1; k < in.size(); ++k) {
      const C* const next = Load<Set>(static_cast<const T*>(in[k]) + begin, next_buffer, length);
      const bool is_last = k + 1 == in.size();
      C* const to = is_last ? result : sum_buffer;
      if constexpr (std::is_floating_point_v<C>) {
        if (is_last && is_scaled) {
          CombineAndScaleBlock<Op>(sum, next, to, length, factor);
        } else {
          CombineBlock<Op>(sum, next, to, length);
        }
      } else {
        CombineBlock<Op>(sum, next, to, length);
      }
      sum = to;
    }
    if constexpr (std::is_floating_point_v<C>) {
      if (in.size() == 1 && is_scaled) {
        ScaleBlock(sum, result, length, factor);
        sum = result;
      }
    }
    Store<Set>(sum, out_block, length);
  }
}

using ReduceFunction = void (*)(void* out, std::span<const void* const> in, int64_t n, double scale);

template <typename Op, typename T>
void ReduceBaseline(void* out, std::span<const void* const> in, int64_t n, double scale) {
  ReduceBlocks<Baseline, Op, T>(out, in, n, scale);
}
#if defined(__x86_64__)
template <typename Op, typename T>
EK_TARGET_AVX2 void ReduceAvx2(void* out, std::span<const void* const> in, int64_t n, double scale) {
  ReduceBlocks<Avx2, Op, T>(out, in, n, scale);
}
template <typename Op, typename T>
EK_TARGET_AVX512 void ReduceAvx512(void* out, std::span<const void* const> in, int64_t n, double scale) {
  ReduceBlocks<Avx512, Op, T>(out, in, n, scale);
}
#endif

template <typename Op, typename T>
ReduceFunction FunctionOfType(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return ReduceAvx512<Op, T>;
  if (set == InstructionSet::kAvx2) return ReduceAvx2<Op, T>;
#endif
  return ReduceBaseline<Op, T>;
}

// Calls `visit` with a null pointer of the dtype's element type.
template <typename Visitor>
auto VisitType(DType dtype, Visitor visit) {
  switch (dtype) {
    case DType::kFloat32:
      break;
    case DType::kFloat64:
      return visit(static_cast<double*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<Float16*>(nullptr));
    case DType::kBFloat16:
      return visit(static_cast<BFloat16*>(nullptr));
    case DType::kInt8:
      return visit(static_cast<int8_t*>(nullptr));
    case DType::kUint8:
      return visit(static_cast<uint8_t*>(nullptr));
    case DType::kInt16:
      return visit(static_cast<int16_t*>(nullptr));
    case DType::kInt32:
      return visit(static_cast<int32_t*>(nullptr));
    case DType::kInt64:
      return visit(static_cast<int64_t*>(nullptr));
  }
  return visit(static_cast<float*>(nullptr));
}

template <typename T>
ReduceFunction FunctionOfOp(InstructionSet set, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      break;
    case ReduceOp::kMin:
      return FunctionOfType<Min, T>(set);
    case ReduceOp::kMax:
      return FunctionOfType<Max, T>(set);
    case ReduceOp::kProduct:
      return FunctionOfType<Product, T>(set);
    case ReduceOp::kBitOr:
      if constexpr (std::is_integral_v<T>) return FunctionOfType<BitOr, T>(set);
      break;
  }
  return FunctionOfType<Sum, T>(set);
}

#if defined(__x86_64__)
// Clang 14 does not know this name in __builtin_cpu_supports.
bool HasF16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

InstructionSet BestInstructionSet() {
  static const InstructionSet best = SupportedInstructionSets().back();
  return best;
}

template <typename T>
T IdentityOf(ReduceOp op) {
  using Limits = std::numeric_limits<Carrier<T>>;
  switch (op) {
    case ReduceOp::kProduct:
      return T(1);
    case ReduceOp::kMin:
      return T(Limits::has_infinity ? Limits::infinity() : Limits::max());
    case ReduceOp::kMax:
      return T(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    default:
      return T(0);
  }
}

}  // namespace

absl::Status CheckReducible(ReduceOp op, DType dtype) {
  if (op != ReduceOp::kBitOr || !IsFloat(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("bit_or needs integers, not ", ToString(dtype)));
}

void ReduceInto(ReduceOp op, DType dtype, void* out, std::span<const void* const> in, int64_t n,
                const ReduceOptions& options) {
  ReduceIntoWith(BestInstructionSet(), op, dtype, out, in, n, options);
}

void Accumulate(ReduceOp op, DType dtype, void* acc, const void* in, int64_t n) {
  const std::array<const void*, 2> both = {acc, in};
  ReduceInto(op == ReduceOp::kAverage ? ReduceOp::kSum : op, dtype, acc, both, n);
}

void Scale(DType dtype, void* data, int64_t n, double scale) {
  if (!IsFloat(dtype) || scale == 1.0) return;
  const std::array<const void*, 1> in = {data};
  ReduceInto(ReduceOp::kSum, dtype, data, in, n, {.scale = scale});
}

void DivideIntegers(DType dtype, void* data, int64_t n, int64_t divisor) {
  if (IsFloat(dtype) || divisor == 1) return;
  VisitType(dtype, [&]<typename T>(T*) {
    if constexpr (std::is_integral_v<T>) {
      T* const values = static_cast<T*>(data);
      for (int64_t i = 0; i < n; ++i) values[i] = static_cast<T>(values[i] / divisor);
    }
  });
}

void FillIdentity(ReduceOp op, DType dtype, void* data, int64_t n) {
  VisitType(dtype, [&]<typename T>(T*) { std::fill_n(static_cast<T*>(data), n, IdentityOf<T>(op)); });
}

std::vector<InstructionSet> SupportedInstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kBaseline};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && HasF16c()) {
    sets.push_back(InstructionSet::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      sets.push_back(InstructionSet::kAvx512);
    }
  }
#endif
  return sets;
}

void ReduceIntoWith(InstructionSet set, ReduceOp op, DType dtype, void* out, std::span<const void* const> in, int64_t n,
                    const ReduceOptions& options) {
  const ReduceFunction reduce = VisitType(dtype, [&]<typename T>(T*) { return FunctionOfOp<T>(set, op); });
  reduce(out, in, n, options.scale);
  if (op == ReduceOp::kAverage) {
    const int64_t inputs = static_cast<int64_t>(in.size());
    DivideIntegers(dtype, out, n, options.integer_divisor > 0 ? options.integer_divisor : inputs);
  }
}

}  // namespace evenkeel::internal
