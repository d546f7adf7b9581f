// Plans an operation with NCCL's calls: the views that go through memory of the backend, the place
// of a scale, and the values filled in for a rank that does not contribute.
//
//   NcclPlan plan = PlanForNccl(operation, rank, world_size, is_alike);
//
// Average and scale: of floats, multiply what each rank contributes, on NCCL's way (its average, or
//          its sum of scaled values) unless the factor would lose precision in the type; of a
//          minimum, a maximum or a product, the result.
// Staged:  several views of one side of an operation that NCCL does on one piece; views that are
//          laid out otherwise, or registered otherwise, on another rank; input that the output
//          would destroy, or that must stay as it is.
//
// Threads: a pure function.

#ifndef EVENKEEL_COMM_NCCL_PLAN_H_
#define EVENKEEL_COMM_NCCL_PLAN_H_

#include "absl/status/status.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

struct NcclPlan {
  bool stages_in = false;
  bool stages_out = false;
  bool fills_identity = false;  // Instead of the input.
  double before = 1.0;  // Multiplies the contribution, in the backend's or the views' memory,
  int op = kNcclSum;
  double inside = 1.0;  // and in NCCL, as a scaled sum (1: `op` as it is),
  double after = 1.0;   // and the result.
};

// All views alike on all ranks: as many, as long, and registered with NCCL at the same places, or
// not.
NcclPlan PlanForNccl(const Operation& operation, int rank, int world_size, bool is_alike);

// OK, or Unimplemented.
absl::Status SupportedByNccl(const Collective& what);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_PLAN_H_
