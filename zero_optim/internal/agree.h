// Whether all ranks have the same optimizer, asked when it is made, and when it comes into another
// group.
//
//   EK_RETURN_IF_ERROR(CheckSameOnAllRanks(comm, "optimizer#0", updater.Check(), params, groups));
//
// Every rank must call it. All ranks get the same answer, as that of VerifySame().

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_AGREE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_AGREE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/parameter_groups.h"

namespace evenkeel::internal {

enum class SameIn {
  kEverything,
  kShape,  // The parameters, and what is remembered of each. Settings and trainability may change
           // while a step fails.
};
// `facts`: more of them, compared first.
absl::Status CheckSameOnAllRanks(Communicator& comm, const std::string& name,
                                 const absl::Status& own, const ParameterSet& params,
                                 const ParameterGroups& groups, SameIn same = SameIn::kEverything,
                                 std::vector<Fact> facts = {});

// One more group of an optimizer, if it is the same on all ranks and none of them has an error;
// else nothing changes.
absl::Status AddGroupOnAllRanks(Communicator& comm, const std::string& name,
                                const ParameterSet& params, ParameterGroup group,
                                ParameterUpdater& updater);

// Takes the settings with which the ranks that were active to the end of a joined loop end it:
// others may have missed a change after the last step. Every rank must call it; FailedPrecondition
// on all if those ranks differ, with both values. Returns whether all ranks were active to the end.
absl::StatusOr<bool> AdoptFromLastJoiners(Communicator& comm, const std::string& name,
                                          ParameterGroups& groups, bool is_last_joiner);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_AGREE_H_
