#include "evenkeel/comm/arith/convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/float_blocks.h"

// Block by block, as the reductions do (reduce_kernels.cc): a block becomes carriers, is
// computed with, and is stored. Between float64 and 16 bits it passes through float32, rounded to
// odd there, so that the second rounding comes out as if it were the only one.

namespace evenkeel {
namespace internal {
namespace {

// The type in which a pair is computed.
template <typename From, typename To>
using Common =
    std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

// The float towards zero, with its last bit set if it is not exact. Has more bits than twice a
// 16-bit float's and so rounds to that as the double itself (Boldo and Melquiond, "When double
// rounding is odd", 2005).
EK_ALWAYS_INLINE float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const uint32_t is_above = std::fabs(back) > std::fabs(value);
  const uint32_t is_inexact = back != value;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(nearest) - is_above) | is_inexact);
}

template <typename Set, typename C, typename T>
EK_ALWAYS_INLINE const C* LoadAs(const T* from, C* buffer, int64_t n) {
  if constexpr (std::is_same_v<C, Carrier<T>>) {
    return Load<Set>(from, buffer, n);
  } else {
    alignas(64) Carrier<T> own[kBlock];
    const Carrier<T>* const in = Load<Set>(from, own, n);
    EK_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < n; ++i) buffer[i] = in[i];
    return buffer;
  }
}

template <typename Set, typename C, typename T>
EK_ALWAYS_INLINE void StoreAs(const C* from, T* to, int64_t n) {
  if constexpr (std::is_same_v<C, Carrier<T>>) {
    Store<Set>(from, to, n);
  } else {
    alignas(64) float narrow[kBlock];
    EK_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < n; ++i)
      narrow[i] = kIsHalf<T> ? RoundToOdd(from[i]) : static_cast<float>(from[i]);
    Store<Set>(narrow, to, n);
  }
}

template <typename Set, typename From, typename To>
EK_ALWAYS_INLINE void ConvertBlocks(const void* from, void* to, int64_t n,
                                    const ConvertOptions& options) {
  using C = Common<From, To>;
  alignas(64) C in_buffer[kBlock];
  alignas(64) C to_buffer[kBlock];
  const C scale = static_cast<C>(options.scale);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t length = std::min(kBlock, n - begin);
    To* const out = static_cast<To*>(to) + begin;
    const C* in = LoadAs<Set, C>(static_cast<const From*>(from) + begin, in_buffer, length);
    if (options.add) {
      const C* const sum = LoadAs<Set, C>(out, to_buffer, length);
      EK_INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < length; ++i) in_buffer[i] = sum[i] + in[i] * scale;
      in = in_buffer;
    } else if (options.scale != 1.0) {
      EK_INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < length; ++i) in_buffer[i] = in[i] * scale;
      in = in_buffer;
    }
    StoreAs<Set>(in, out, length);
  }
}

using ConvertFunction = void (*)(const void* from, void* to, int64_t n,
                                 const ConvertOptions& options);

template <typename From, typename To>
void ConvertBaseline(const void* from, void* to, int64_t n, const ConvertOptions& options) {
  ConvertBlocks<Baseline, From, To>(from, to, n, options);
}
#if defined(__x86_64__)
template <typename From, typename To>
EK_TARGET_AVX2 void ConvertAvx2(const void* from, void* to, int64_t n,
                                const ConvertOptions& options) {
  ConvertBlocks<Avx2, From, To>(from, to, n, options);
}
template <typename From, typename To>
EK_TARGET_AVX512 void ConvertAvx512(const void* from, void* to, int64_t n,
                                    const ConvertOptions& options) {
  ConvertBlocks<Avx512, From, To>(from, to, n, options);
}
#endif

template <typename From, typename To>
ConvertFunction FunctionFor(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return ConvertAvx512<From, To>;
  if (set == InstructionSet::kAvx2) return ConvertAvx2<From, To>;
#endif
  return ConvertBaseline<From, To>;
}

template <typename From>
ConvertFunction FunctionFrom(InstructionSet set, DType to) {
  if (to == DType::kFloat64) return FunctionFor<From, double>(set);
  if (to == DType::kFloat16) return FunctionFor<From, Float16>(set);
  if (to == DType::kBFloat16) return FunctionFor<From, BFloat16>(set);
  return FunctionFor<From, float>(set);
}

ConvertFunction FunctionOf(InstructionSet set, DType from, DType to) {
  if (from == DType::kFloat64) return FunctionFrom<double>(set, to);
  if (from == DType::kFloat16) return FunctionFrom<Float16>(set, to);
  if (from == DType::kBFloat16) return FunctionFrom<BFloat16>(set, to);
  return FunctionFrom<float>(set, to);
}

}  // namespace

void ConvertFloatsWith(InstructionSet set, const TensorView& from, const TensorView& to,
                       const ConvertOptions& options) {
  if (from.count == 0) return;
  FunctionOf(set, from.dtype, to.dtype)(from.data, to.data, from.count, options);
}

}  // namespace internal

absl::Status CheckConvertible(const TensorView& from, const TensorView& to) {
  if (!from.device.is_cpu() || !to.device.is_cpu()) {
    return absl::UnimplementedError(absl::StrCat("cannot convert ", ToString(from), " to ",
                                                 ToString(to), ": only memory of the CPU"));
  }
  if (!IsFloat(from.dtype) || !IsFloat(to.dtype) || from.count != to.count) {
    return absl::InvalidArgumentError(absl::StrCat("cannot convert ", ToString(from), " to ",
                                                   ToString(to), ": floats of one count"));
  }
  return absl::OkStatus();
}

void ConvertFloats(const TensorView& from, const TensorView& to, const ConvertOptions& options) {
  internal::ConvertFloatsWith(internal::BestInstructionSet(), from, to, options);
}

}  // namespace evenkeel
