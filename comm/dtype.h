// The types of elements, and the ways to reduce them.
//
//   SizeOf(DType::kFloat32)   // 4
//
// The part of comm/types.h that needs the standard library alone.

#ifndef EVENKEEL_COMM_DTYPE_H_
#define EVENKEEL_COMM_DTYPE_H_

#include <cstdint>

namespace evenkeel {

enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kUint8,
  kInt16,
  kInt32,
  kInt64
};
inline constexpr DType kAllDTypes[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                       DType::kBFloat16, DType::kInt8,    DType::kUint8,
                                       DType::kInt16,    DType::kInt32,   DType::kInt64};

// Returns the bytes of one element.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUint8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct, kBitOr, kBitAnd, kBitXor };
inline constexpr ReduceOp kAllReduceOps[] = {
    ReduceOp::kSum,     ReduceOp::kAverage, ReduceOp::kMin,    ReduceOp::kMax,
    ReduceOp::kProduct, ReduceOp::kBitOr,   ReduceOp::kBitAnd, ReduceOp::kBitXor};

// Returns whether it combines bits, so that it needs integers.
constexpr bool IsBitwise(ReduceOp op) {
  return op == ReduceOp::kBitOr || op == ReduceOp::kBitAnd || op == ReduceOp::kBitXor;
}

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DTYPE_H_
