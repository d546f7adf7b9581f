// The element-wise loops of reductions on the CPU.
//
//   const void* in[] = {rank0.data, rank1.data, rank2.data};
//   ReduceInto(ReduceOp::kSum, DType::kFloat32, out.data, in, out.count, 1.0 / 3);
//
// Order:    ReduceInto combines in[0], in[1], ... strictly in that order for each element by
//           itself, so the result does not depend on how a caller slices the range, nor on the
//           machine: each processor's path gives the same bits (except for which NaN a NaN is).
// Rounding: 16-bit floats are combined in float32, scaled there, and rounded once.
// Integers: sums and products wrap around.
// Bits:     bit_or, bit_and and bit_xor are for integers alone.
// NaN:      min and max give NaN if any input is NaN.
// Aliasing: `out` may be one of the inputs; partial overlap is not allowed.
// Threads:  pure functions on the caller's memory.

#ifndef EVENKEEL_COMM_ARITH_REDUCE_KERNELS_H_
#define EVENKEEL_COMM_ARITH_REDUCE_KERNELS_H_

#include <cstdint>
#include <span>

#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

// out = in[0] op in[1] op ..., for n elements; at least one input. An average is a sum. The result
// of floats is multiplied by `scale` (1.0: left alone), in float32, or float64 for float64;
// integers ignore it.
void ReduceInto(ReduceOp op, DType dtype, void* out, std::span<const void* const> in, int64_t n,
                double scale = 1.0);

// acc = acc op in. A chain of these rounds 16-bit floats at each link; ReduceInto does not.
void Accumulate(ReduceOp op, DType dtype, void* acc, const void* in, int64_t n);

// Multiplies floats as ReduceInto() does; leaves integers alone.
void Scale(DType dtype, void* data, int64_t n, double scale);

// Fills `data` with the value that changes nothing when it is combined: 0, 1, or the end of the
// type's range (infinity for floats).
void FillIdentity(ReduceOp op, DType dtype, void* data, int64_t n);

// For tests and benchmarks: ReduceInto on one of SupportedInstructionSets().
void ReduceIntoWith(InstructionSet set, ReduceOp op, DType dtype, void* out,
                    std::span<const void* const> in, int64_t n, double scale);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_REDUCE_KERNELS_H_
