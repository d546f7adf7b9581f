#include "evenkeel/comm/arith/reduce_kernels.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "evenkeel/comm/arith/float_blocks.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"

// The work goes block by block: a block of every input passes through the first-level cache once,
// and one instruction set's copy of the same plain loops, vectorised by the compiler, combines
// them. The loops are always_inline templates, so that they take on the instruction set of the
// function around them; that one is chosen by hand at run time, because an ifunc's resolver runs
// before a sanitizer is ready. This file is compiled without contraction of a * b + c, which would
// round differently where the processor has it.

namespace evenkeel::internal {
namespace {

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

struct BitAnd {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitXor {
  template <typename T>
  static EK_ALWAYS_INLINE T Combine(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

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
EK_ALWAYS_INLINE void ReduceBlocks(void* out, std::span<const void* const> in, int64_t n,
                                   double scale) {
  using C = Carrier<T>;
  constexpr bool kInPlace =
      std::is_same_v<C, T>;  // The last combination can write to `out` itself.
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

using ReduceFunction = void (*)(void* out, std::span<const void* const> in, int64_t n,
                                double scale);

template <typename Op, typename T>
void ReduceBaseline(void* out, std::span<const void* const> in, int64_t n, double scale) {
  ReduceBlocks<Baseline, Op, T>(out, in, n, scale);
}
#if defined(__x86_64__)
template <typename Op, typename T>
EK_TARGET_AVX2 void ReduceAvx2(void* out, std::span<const void* const> in, int64_t n,
                               double scale) {
  ReduceBlocks<Avx2, Op, T>(out, in, n, scale);
}
template <typename Op, typename T>
EK_TARGET_AVX512 void ReduceAvx512(void* out, std::span<const void* const> in, int64_t n,
                                   double scale) {
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
    case ReduceOp::kBitAnd:
      if constexpr (std::is_integral_v<T>) return FunctionOfType<BitAnd, T>(set);
      break;
    case ReduceOp::kBitXor:
      if constexpr (std::is_integral_v<T>) return FunctionOfType<BitXor, T>(set);
      break;
  }
  return FunctionOfType<Sum, T>(set);
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
    case ReduceOp::kBitAnd:
      if constexpr (std::is_integral_v<T>) return static_cast<T>(~T(0));
      return T(0);
    default:
      return T(0);
  }
}

}  // namespace

void ReduceInto(ReduceOp op, DType dtype, void* out, std::span<const void* const> in, int64_t n,
                double scale) {
  ReduceIntoWith(BestInstructionSet(), op, dtype, out, in, n, scale);
}

void Accumulate(ReduceOp op, DType dtype, void* acc, const void* in, int64_t n) {
  const std::array<const void*, 2> both = {acc, in};
  ReduceInto(op, dtype, acc, both, n);
}

void Scale(DType dtype, void* data, int64_t n, double scale) {
  if (!IsFloat(dtype) || scale == 1.0) return;
  const std::array<const void*, 1> in = {data};
  ReduceInto(ReduceOp::kSum, dtype, data, in, n, scale);
}

void FillIdentity(ReduceOp op, DType dtype, void* data, int64_t n) {
  VisitType(dtype,
            [&]<typename T>(T*) { std::fill_n(static_cast<T*>(data), n, IdentityOf<T>(op)); });
}

void ReduceIntoWith(InstructionSet set, ReduceOp op, DType dtype, void* out,
                    std::span<const void* const> in, int64_t n, double scale) {
  const ReduceFunction reduce =
      VisitType(dtype, [&]<typename T>(T*) { return FunctionOfOp<T>(set, op); });
  reduce(out, in, n, scale);
}

}  // namespace evenkeel::internal
