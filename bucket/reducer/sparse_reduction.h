// Reduces the gradients that consist of some rows: every rank gets every rank's, and adds them up
// in the order of ranks.
//
//   counts of rows (all_gather)  ->  per parameter that has any: row numbers, then their elements
//   (all_gathers, padded to the largest rank's)  ->  rows sorted, equal ones added, scaled
//
// A rank sends each row once, so the sums are those of a dense gradient. How many rows travel is
// known to nobody before: in the schedule these collectives have count 0.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_REDUCER_SPARSE_REDUCTION_H_
#define EVENKEEL_BUCKET_REDUCER_SPARSE_REDUCTION_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

// Returns the collectives that ReduceSparse() issues, for the schedule. None if nothing is sparse.
// `sparse`: the parameters, in the order of their buckets.
std::vector<Collective> SparseCollectives(const ParameterSet& params, absl::Span<const int> sparse);
// All ranks together. Gradients with state kNone contribute nothing. Afterwards a gradient is
// kReduced, with equal rows on all ranks, multiplied by `scale`; or none, if no rank had a row.
absl::Status ReduceSparse(ParameterSet& params, absl::Span<const int> sparse, Channel& channel,
                          int world_size, double scale);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_SPARSE_REDUCTION_H_
