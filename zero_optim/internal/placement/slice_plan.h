// A rank's part in each bucket of a plan: where its slice of the gradients is, which parts of
// parameters that updates, and what it sends and receives when the updated parameters are gathered.
//
//   EK_ASSIGN_OR_RETURN(SlicePlan plan, PlanSlices(buckets, params, rank, world_size, allocate));
//   plan.buckets[0].gradient;  // what a reduce-scatter of the bucket leaves here
//   channel.Issue(plan.buckets[0].gather, OwnValues(plan.buckets[0], params),
//                 AllValues(plan.buckets[0], params));
//
// The all-gather reads and writes the parameters themselves, as one operation of many views: there
// is no flat copy of them, and no copy at all but those of a transport that wants its data in one
// piece.
//
// Ownership: the plan owns the memory of the values' padding; gradients belong to the reducer,
//            values to the user.
// Threads:   immutable.
// Errors:    InternalError for a bucket that the ranks can't share equally.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_PLAN_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/internal/placement/slice_layout.h"

namespace evenkeel::internal {

struct SlicePlan {
  struct Bucket {
    SlicedBucket layout;
    TensorView gradient;  // This rank's slice, in the bucket's memory or in `gradients` below.
    std::vector<TensorView>
        gradients;  // In it, by position of the parameter; empty where the slice has none of it.
    int first_flag = 0;  // The bucket's first, among the used flags of all buckets.
    Collective gather;
    std::vector<Segment> own;         // Updated by the slice.
    TensorView own_padding, padding;  // Behind it, and behind all slices.
  };
  std::vector<Bucket> buckets;
  std::vector<int> bucket_of;  // By parameter; -1: in none.
  int flag_count = 0;          // One per parameter in a bucket.
  Memory gradients;            // Of slices that have outlived the bucket's memory.
  Memory padding;  // The group's: a gather is read where it lies only if all of it lies in such
                   // memory.
};

// Slices of `buckets`, whose sizes are multiples of world_size * kSliceUnit. `allocate`:
// Communicator::Allocate().
absl::StatusOr<SlicePlan> PlanSlices(
    absl::Span<const BucketInfo> buckets, const ParameterSet& params, int rank, int world_size,
    absl::FunctionRef<absl::StatusOr<Memory>(int64_t bytes)> allocate);

// The part of a bucket's updated values that this rank sends, and all of them; both at the values'
// current addresses.
TensorList OwnValues(const SlicePlan::Bucket& bucket, const ParameterSet& params);
TensorList AllValues(const SlicePlan::Bucket& bucket, const ParameterSet& params);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_PLAN_H_
