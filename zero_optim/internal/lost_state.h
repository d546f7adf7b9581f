// The ranks' reports on a sharded optimizer's state when they come into a new group, and the
// errors: a part of the state is missing, or belongs to another step, to which it can't be taken
// back.
//
//   EK_RETURN_IF_ERROR(CheckSameStep(standings));
//   if (!lost.empty()) return LostStateError(lost, standings);
//
// Threads: pure functions of values.
// Errors:  FailedPrecondition, with the way out.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_LOST_STATE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_LOST_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/base/bytes.h"

namespace evenkeel::internal {

struct Standing {
  int64_t steps_finished = 0;
  bool is_torn = false;   // It was in the middle of an update.
  bool may_lose = false;  // LostShard::kFresh.
  bool holds_state = false;
  std::string checkpoint_hint;

  void Write(ByteWriter& writer) const;
  static Standing Read(ByteReader& reader);
};

// OK if nobody is in the middle of an update, and all that hold state are at one step.
absl::Status CheckSameStep(const std::vector<Standing>& by_rank);

// `ranks` of the old group are not there, and held state.
absl::Status LostStateError(const std::vector<int>& ranks, const std::vector<Standing>& by_rank);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_LOST_STATE_H_
