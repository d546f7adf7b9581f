// Tensors of one float type into another: the bulk form of what Float16(x) and float(half) do for one element.
//
//   EK_RETURN_IF_ERROR(CheckConvertible(gradient, wire));           // float32[n], float16[n]
//   ConvertFloats(gradient, wire, {.scale = 1.0 / world_size});     // wire = float16(gradient * scale)
//   ConvertFloats(wire, gradient, {.add = true});                   // gradient += float32(wire)
//
// Rounding: to nearest even, once, from a float32 computation (float64 where one of the two is); so without `scale` and
//           `add` each element is the float nearest to it, and from float64 to 16 bits as well. Too large becomes
//           infinity, subnormals are exact, NaN stays NaN. Each processor gives the same bits (except for which NaN).
// Aliasing: `from` and `to` may be the same tensor; partial overlap is not allowed.
// Threads:  pure functions on the caller's memory.
// Errors:   CheckConvertible() says InvalidArgument for other types or counts that differ, Unimplemented for memory
//           that is not the CPU's; ConvertFloats() takes only what passes there.

#ifndef EVENKEEL_COMM_CONVERT_H_
#define EVENKEEL_COMM_CONVERT_H_

#include "absl/status/status.h"
#include "evenkeel/comm/internal/instruction_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct ConvertOptions {
  double scale = 1.0;  // What is converted is multiplied by it.
  bool add = false;    // It is added to what is in `to`.
};

absl::Status CheckConvertible(const TensorView& from, const TensorView& to);
void ConvertFloats(const TensorView& from, const TensorView& to, const ConvertOptions& options = {});

namespace internal {
// For tests and benchmarks: on one of SupportedInstructionSets().
void ConvertFloatsWith(InstructionSet set, const TensorView& from, const TensorView& to, const ConvertOptions& options);
}  // namespace internal

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_CONVERT_H_
