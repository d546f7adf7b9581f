// Reduces the gradients that consist of some rows: every rank gets every rank's, and adds them up in the order of ranks.
//
//   counts of rows (all_gather)  ->  per parameter that has any: row numbers, then their elements (all_gathers, padded to
//   the largest rank's)  ->  rows sorted, equal ones added, scaled
//
// A rank sends each row once, so the sums are those of a dense gradient. How many rows travel is known to nobody before:
// in the schedule these collectives have count 0.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_INTERNAL_SPARSE_REDUCTION_H_
#define EVENKEEL_BUCKET_INTERNAL_SPARSE_REDUCTION_H_

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

class SparseReduction {
 public:
  SparseReduction() = default;
  // `sparse`: the parameters, in the order of their buckets.
  explicit SparseReduction(std::vector<int> sparse) : sparse_(std::move(sparse)) {}

  const std::vector<int>& sparse() const { return sparse_; }
  // What Run() issues, for the schedule. None if nothing is sparse.
  std::vector<Collective> Collectives(const ParameterSet& params) const;
  // All ranks together. Gradients with state kNone contribute nothing. Afterwards a gradient is kReduced, with equal rows
  // on all ranks, multiplied by `scale`; or none, if no rank had a row.
  absl::Status Run(ParameterSet& params, Channel& channel, int world_size, double scale) const;

 private:
  std::vector<int> sparse_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_SPARSE_REDUCTION_H_
