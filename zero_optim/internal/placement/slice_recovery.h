// Plans with which part of their state the ranks of a sliced optimizer continue in a new group. A
// pure function of all ranks' reports, so that all come to one answer.
//
//   SliceFacts mine{...};  // every rank's, over the control plane
//   EK_ASSIGN_OR_RETURN(SliceStart start, PlanSliceStart(by_rank));
//   // start.holders[p]: who has which elements of parameter p's state; nothing has to move for
//     that
//
// Threads: pure functions of values.
// Errors:  FailedPrecondition, unless every rank may lose state: somebody who is not there held
//          some, or the ranks are not at the same step. If they may, a parameter of which any part
//          is missing begins anew as a whole: there is one step count per parameter.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_RECOVERY_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_RECOVERY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/zero_optim/internal/lost_state.h"
#include "evenkeel/zero_optim/internal/placement/slice_layout.h"

namespace evenkeel::internal {

struct SliceFacts {
  Standing standing;
  int old_rank = 0;  // In the group that it comes from, and that group's size.
  int old_world_size = 1;
  struct Held {
    int64_t step = 0;  // Updates of the parameter, as this rank knows them; 0: there is no state.
    int64_t begin = 0;
    int64_t count = 0;  // Elements whose state is here.
  };
  std::vector<Held> held;  // By parameter.

  std::string Serialize() const;
  // InvalidArgument for what Serialize() for parameters of these sizes can't have made.
  static absl::StatusOr<SliceFacts> Parse(absl::string_view bytes,
                                          const std::vector<int64_t>& sizes);
};

struct SliceStart {
  std::vector<int64_t> steps;    // By parameter; 0: it begins anew.
  std::vector<Holders> holders;  // By parameter, in ranks of the new group; each holds what it
                                 // brings, or a part of that.
};

absl::StatusOr<SliceStart> PlanSliceStart(const std::vector<SliceFacts>& by_rank,
                                          const std::vector<int64_t>& sizes);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_RECOVERY_H_
