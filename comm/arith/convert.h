// Converts tensors between float types: the bulk form of Float16(x) and float(half).
//
//   EK_RETURN_IF_ERROR(CheckConvertible(gradient, wire));           // float32[n], float16[n]
//   // wire = float16(gradient * scale)
//   ConvertFloats(gradient, wire, {.scale = 1.0 / world_size});
//   ConvertFloats(wire, gradient, {.add = true});                   // gradient += float32(wire)
//
// Rounding: to nearest even, once, from a float32 computation (float64 where one of the two is); so
//           without `scale` and `add` each element becomes the nearest float, also from float64 to
//           16 bits. Values that are too large become infinity, subnormals are exact, NaN stays
//           NaN. All processors give the same bits (except for the kind of NaN).
// Aliasing: `from` and `to` may be the same tensor; partial overlap is not allowed.
// Threads:  pure functions on the caller's memory.
// Errors:   CheckConvertible() returns InvalidArgument for other types or different counts, and
//           Unimplemented for memory of a device; ConvertFloats() requires that it returns OK.

#ifndef EVENKEEL_COMM_ARITH_CONVERT_H_
#define EVENKEEL_COMM_ARITH_CONVERT_H_

#include "absl/status/status.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct ConvertOptions {
  double scale = 1.0;  // A factor for the converted values.
  bool add = false;    // Adds to the values in `to`.
};

absl::Status CheckConvertible(const TensorView& from, const TensorView& to);
void ConvertFloats(const TensorView& from, const TensorView& to,
                   const ConvertOptions& options = {});

namespace internal {
// For tests and benchmarks: on one of SupportedInstructionSets().
void ConvertFloatsWith(InstructionSet set, const TensorView& from, const TensorView& to,
                       const ConvertOptions& options);
}  // namespace internal

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_ARITH_CONVERT_H_
