// Plans how the state of a sharded optimizer moves into a new group: who holds the state of which
// parameter, and whether something is missing. A pure function of all ranks' reports, so that all
// come to one answer.
//
//   ShardFacts mine{...};  // every rank's, over the control plane
//   EK_ASSIGN_OR_RETURN(ShardMove move, PlanShardMove(by_rank, /*plan_from=*/-1));
//   // the state of parameter p goes from rank move.holder[p] to its owner in the new group
//
// Threads: pure functions of values.
// Errors:  FailedPrecondition, unless every rank may lose state: somebody who is not there held
//          some, or the ranks are not at the same step, to which a shard can't be taken back.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SHARD_MOVE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SHARD_MOVE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/zero_optim/internal/lost_state.h"

namespace evenkeel::internal {

struct ShardFacts {
  Standing standing;
  uint64_t generation = 0;  // The plan's.
  int old_rank = -1;        // Among its owners.
  TrainableMask mask;
  // By parameter: its owner in the old group; whether there was ever a step for it (which may have
  // been skipped, or found no gradient: the owner knows); how often it was updated, if the state is
  // here.
  std::vector<int> owners;
  std::vector<uint8_t> was_updated;
  std::vector<int64_t> held_steps;

  std::string Serialize() const;
  // InvalidArgument for what Serialize() for `param_count` parameters can't have made.
  static absl::StatusOr<ShardFacts> Parse(absl::string_view bytes, int param_count);
};

struct ShardMove {
  uint64_t generation = 0;  // Newer than any that a rank had.
  TrainableMask mask;
  std::vector<int> owned;      // Parameters that have an owner, ascending.
  std::vector<int> holder;     // By parameter: the rank that brings its state; -1: there is none.
  std::vector<int64_t> steps;  // By parameter: updates so far.
};

// The plan that counts is that of rank `plan_from`, or the newest if that is -1.
absl::StatusOr<ShardMove> PlanShardMove(const std::vector<ShardFacts>& by_rank, int plan_from);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SHARD_MOVE_H_
